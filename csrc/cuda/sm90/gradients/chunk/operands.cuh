// gradients/chunk: q^ and k^ of a chunk, from memory or from raw gates.
#pragma once

#include "copies.cuh"
#include "cuda/sm90/prepare/prepared.cuh"

namespace gla_ext::cuda::sm90::gradients::chunk {

// Starts the copies of the first values and of the states' columns for them, and stores where the
// later ones are.
template <int kTiles>
__device__ __forceinline__ void start_values(Shared<kTiles>& s, const Problem& p,
                                             const Chunk& chunk) {
  const int64_t state = chunk.state * p.K * p.V;
  const Bases bases{own_rows_at<const bf16>(p.d_o, chunk), rows_at<const bf16>(p.v, chunk),
                    static_cast<const bf16*>(p.S) + state, static_cast<const bf16*>(p.dS) + state,
                    own_rows_at<bf16>(p.dv, chunk)};
  copy_values(s, p, bases, chunk.length, 0);
  if (kReady<kTiles> && threadIdx.x == 0) s.init_barriers();
  copy_states(s, p, bases, chunk.state, 0);
  commit_copies();
  if (threadIdx.x == 0) {
    s.chunk = chunk;
    s.bases = bases;
  }
}

// Copies q^ or k^ of a prepared chunk, tiles from `first` on.
template <int kTiles>
__device__ __forceinline__ void copy_operands(Tile (&tiles)[kTiles], const unsigned char* operands,
                                              int first = 0) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const unsigned char* from =
        operands + i / kKeyTiles * static_cast<int>(sizeof(KeyGroup)) + i % kKeyTiles * kTileBytes;
#pragma unroll
    for (int at = 0; at < kTileBytes; at += kGroupsFor<kTiles> * kGroupThreads * 16) {
      const int offset = thread_index() * 16 + at;
      if (i >= first) copy16(shared_address(&tiles[i]) + offset, from + offset, true);
    }
  }
}

// Loads q^ and k^ that prepare.cu has made. On return the first values are still being copied.
template <int kTiles>
__device__ __forceinline__ void load_operands(Shared<kTiles>& s, const Problem& p,
                                              const Chunk& chunk) {
  const unsigned char* operands = prepared_at(p, chunk.entry);
  copy_operands(s.q, operands);
  copy_operands(s.k, operands + offsetof(KeyGroup, k));
  commit_copies();
  start_values(s, p, chunk);
  wait_for_copies<1>();  // all but the values
}

// Makes q^, k^, k_out and b_C while the first values are copied. gate_rows in prepare/prepare.cu
// does the same from rows in shared memory; here q, k and g are in registers, and k_out is made
// too.
template <class Gate>
__device__ __forceinline__ void gate_operands(Shared<1>& s, const Problem& p, const Chunk& chunk,
                                              bool strong) {
  const ChannelPair<1> pair;
  const ChannelPairColumn<Gate> gates(p.g, p, chunk, pair.first, pair.channel);
  const ChannelPairColumn<bf16> q(p.q, p, chunk, pair.first, pair.channel);
  const ChannelPairColumn<bf16> k(p.k, p, chunk, pair.first, pair.channel);
  start_values(s, p, chunk);
  sum_gates(s.sums().gates, gates, pair);
  __syncthreads();  // s.sums().gates is written
  auto [b, last] = cumsum(s.sums().gates, pair);
  if (pair.sub_chunk == 0) pair_at(s.own.b_last, pair.channel) = last;
  const References rx(last.x, strong), ry(last.y, strong);
  const float out_x = exp2_ftz(last.x - rx.to), out_y = exp2_ftz(last.y - ry.to);
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) {
    b = b + to_log2(gates[i]);
    const int at = pair.offset(pair.first + i);
    const float k_x = k[i].x * exp2_ftz(rx.to - b.x), k_y = k[i].y * exp2_ftz(ry.to - b.y);
    in_tile<uint32_t>(*s.q, at) = pack(q[i].x * p.scale * exp2_ftz(b.x - rx.from),
                                       q[i].y * p.scale * exp2_ftz(b.y - ry.from));
    in_tile<uint32_t>(*s.k, at) = pack(k_x, k_y);
    in_tile<uint32_t>(s.own.k_out, at) = pack(k_x * out_x, k_y * out_y);
  }
}

}  // namespace gla_ext::cuda::sm90::gradients::chunk
