// All gradients of one chunk, for gradients/chunk, and for chunks without a partner in
// gradients/chunk_pair.
#pragma once

#include "products.cuh"
#include "results.cuh"

namespace gla_ext::cuda::sm90::gradients::chunk {

// Writes zeros to the gradients of the tokens after the last sequence.
template <class Gate, int kTiles>
__device__ __forceinline__ void clear_gradients(const Problem& p, const Chunk& chunk) {
  clear_rows<bf16, kTiles>(p.dq, chunk, p.K);
  clear_rows<bf16, kTiles>(p.dk, chunk, p.K);
  clear_rows<Gate, kTiles>(p.dg, chunk, p.K);
  clear_rows<bf16, kTiles>(p.dv, chunk, p.V);
}

template <class Gate, int kTiles>
__device__ __forceinline__ void make_gradients(Shared<kTiles>& s, const Problem& p,
                                               const Chunk& chunk) {
  const bool strong = __any_sync(0xffffffffu, !in_tier1(p, chunk));
  if constexpr (kReady<kTiles>)
    load_operands(s, p, chunk);
  else
    gate_operands<Gate>(s, p, chunk, strong);
  fence_for_products();
  __syncthreads();  // q^ and k^ are written, also k_out and b_C; s.sums().gates is read
  scores(s, p, chunk, strong);

  Accumulators<kTiles> acc;
  float dA[32 / kGroupsFor<kTiles>];
  clear(dA);
  multiply_values(acc, dA, s, p);
  Tile& scores_tile = s.operands.states[0].S[0];
  if (!strong) store_scores(scores_tile, dA);
  if constexpr (!kReady<kTiles>) scale_inter(acc, s, strong);
  sum_inter(s, s.k, acc);
  const ChannelPair<kGroupsFor<kTiles>> pair;
  const ChannelPairColumn<Gate> gates(p.g, p, s.chunk, pair.first, pair.channel);
  wait_for_copies<0>();  // all of q^ has arrived
  if (!strong) {
    fence_for_products();
    __syncthreads();  // dA is written
    acc.multiply_scores(scores_tile, s.k, s.q);
  }
  sum_gates(s.sums().gates, gates, pair);
  __syncthreads();  // dA is read: x and y take its place
  store_accumulators(s.gradients, acc);
  __syncthreads();  // x, y and all sums but dg's are written
  if (strong)
    write_gradients<true>(s, gates, p);
  else
    write_gradients<false>(s, gates, p);
}

}  // namespace gla_ext::cuda::sm90::gradients::chunk
