// gradients/sweep: a chunk's gradients, by a consumer.
#pragma once

#include "cuda/sm90/gradients/common/gates.cuh"
#include "cuda/sm90/gradients/common/results.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::gradients::sweep {

// Sums what dg owes to k through the states that leave the chunk.
__device__ __forceinline__ void sum_inter(Queries& queries, int rank, const float (&y)[32],
                                          const unsigned char* k) {
  const int thread = thread_index() % kGroupThreads;
  const Fragments fragments(thread);
  float sums[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t words[4];
    fragments.load(words, shared_address(k), i);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * i + 4 * j + 2 * e;
        sum = sum + unpack(words[2 * j + e]) * make_float2(y[at], y[at + 1]);
      }
      sums[4 * i + 2 * j] = sum.x;
      sums[4 * i + 2 * j + 1] = sum.y;
    }
  }
  // Lane 4 g + t is left with pair t of the g-th eight columns, summed over the warp's rows.
  fold_rows<4>(sums);
  fold_rows<2>(sums);
  fold_rows<1>(sums);
  pair_at(queries.inter(rank, thread / kWarp), thread % kWarp / 4 * 8 + thread % 4 * 2) =
      make_float2(sums[0], sums[1]);
}

// Stores dA, zero above the diagonal.
__device__ __forceinline__ void store_score_grads(unsigned char* tile, float (&dA)[32]) {
  const Lane lane;
#pragma unroll
  for (int j = 0; j < 32; ++j)
    dA[j] = j / 4 * 8 + 2 * lane.t + j % 2 <= lane.row + j / 2 % 2 * 8 ? dA[j] : 0.f;
  store_tile(tile, dA);
}

// A consumer's work on every other chunk.
template <int kSlices, class SharedOfKernel>
__device__ __forceinline__ void consume(SharedOfKernel& s, const Problem& p, int consumer,
                                        int rank) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  using Gate = typename SharedOfKernel::Gate;
  const Segment& segment = s.segment;
  const GatePart<Gate> part(p, segment, rank);
  constexpr bool kByProducts = GatePart<Gate>::kByProducts;
  Ring<SharedOfKernel::kSliceStages> slice;
  Ring<kStateStages> state;
  const auto skip = [&] {
    slice.template skip<kSlices>();
    state.template skip<kSlices>();
  };
  if (consumer > 0) skip();
  const bool loads = threadIdx.x % kGroupThreads == 0;
  if (loads) {
    load_queries(s, p, consumer, rank);
    load_keys(s, p, consumer);
    if (consumer == 0) load_queries(s, p, kConsumers, rank);
  }
  ChannelPairColumn<Gate> gates;  // those that products do not sum
  if constexpr (kByProducts)
    part.copy(s.own[consumer], consumer);
  else
    gates = part.load(consumer);
#pragma unroll 1
  for (int i = consumer; i < segment.chunks; i += kConsumers) {
    // Computed again in each round, with the addresses that follow from it, so that they take no
    // registers in between.
    const int self = i % kConsumers, role = kConsumer + self, chunk = chunk_of(segment, i);
    const uint32_t parity = i / kConsumers & 1;
    Own<Gate>& own = s.own[self];
    Queries& queries = s.queries[i % kQueryStages];
    Keys& keys = s.keys[self];
    wait(&s.queries_full[i % kQueryStages], i / kQueryStages & 1);
    const bool strong = __any_sync(0xffffffffu, s.strong[i % kQueryStages].x);
    if constexpr (!kByProducts)
      part.write_exponents(own, float_tile(own.tile), gates, queries, rank, chunk, role);
    // Only when the other consumer has left its slices are the phases of the slices' barriers this
    // chunk's.
    if (i > 0) wait(&s.turn[self], (i - 1) / kConsumers & 1);
    float x[32], y[32], dA[32];
    clear(x);
    clear(y);
    clear(dA);
#pragma unroll 1
    for (int j = 0; j < kSlices; ++j, slice.next(), state.next()) {
      const Slice& values = s.slices[slice.stage];
      unsigned char* dS = s.dS[state.stage];
      wait(&s.full[slice.stage], slice.parity);
      fence_for_products();  // the copies
      const uint64_t d_o = descriptor(shared_address(values.d_o), 0),
                     S_and_v = descriptor(shared_address(values.S), 0);
      begin_products();
#pragma unroll
      for (int t = 0; t < 4; ++t)
        product<kSummed, kSummed>(x, dA, d_o + t * (kStepBytes >> 4),
                                  S_and_v + t * (kStepBytes >> 4));
      commit_products();
      wait(&s.ready[state.stage], state.parity);
      begin_products();
      multiply<kSummed, kSummed>(y, shared_address(values.v), shared_address(dS));
      commit_products();
      const bool is_own = j % kClusterBlocks == rank;
      const auto leave = [&] {
        wait_for_products<0>();
        arrive_as_warp(&s.empty[slice.stage]);
        arrive_as_warp(&s.taken[state.stage]);
        if (is_own) arrive_as_warp(&s.taken[state.stage]);  // dS~ was not sent
        if (j + 1 == kSlices) arrive_as_warp(&s.turn[kConsumers - 1 - self]);
      };
      if (!is_own) {
        leave();
        continue;
      }
      wait(&s.keys_full[self], parity);
      const int slot = received_slot<kSlices>(i, j);
      wait(&s.received_full[slot], received_parity<kSlices>(i));
      unsigned char* tile = s.received[slot];
      const uint32_t other = shared_address(tile), mine = shared_address(dS);
      float dv[32];
      clear(dv);
      begin_products();
      multiply<kOther, kOther>(dv, shared_address(keys.A), shared_address(values.d_o));
      multiply<kSummed, kOther>(dv, shared_address(keys.k[0]), rank == 0 ? mine : other);
      multiply<kSummed, kOther>(dv, shared_address(keys.k[1]), rank == 0 ? other : mine);
      commit_products();
      leave();
      role_barrier(role);  // all warps' products have read what was sent
      store_tile(tile, dv);
      TileRows rows;
      rows.read(tile);
      // The tile that the other block's next bulk copy overwrites has been read. This fence, which
      // covers everything before it, tells the other block so; the arrival alone, of this block's
      // scope, would not.
      fence_for_products();
      __syncwarp();
      if (threadIdx.x % kWarp == 0) arrive_in_cluster(address_in(&s.taken[state.stage], 1 - rank));
      rows.write(p.dv, segment, chunk, j * kTile, p.V);
    }
    skip();  // the other consumer's
    const auto release = [&] {
      fence_for_products();  // before the next chunks' bulk copies
      arrive(&s.chunk_empty[self]);
      if (loads) {
        wait(&s.chunk_empty[self], parity);
        load_keys(s, p, i + kConsumers);
        load_queries(s, p, i + kQueryStages, rank);
      }
      __syncwarp();
    };
    if (strong) {
      wait(&s.states_full[i % kQueryStages], i / kQueryStages & 1);
      FloatTile q_terms = float_tile(own.tile), k_terms = float_tile(keys.k[0]);
      if constexpr (kByProducts) {
        q_terms = {keys.A, own.tile};
        wait_for_copies<0>();
        part.write_exponents(own, q_terms, part.load(i), queries, rank, chunk, role);
      } else {
        gates = part.load(i + kConsumers);
      }
      role_barrier(role);  // k^ is read
      part.write_strong_exponents(own, k_terms, queries, rank, chunk);
      role_barrier(role);  // the exponents are written
      finish_strong(x, q_terms, p.scale);
      finish_strong(y, k_terms, 1.f);
      role_barrier(role);  // dq and dk are
      part.write_strong_gradients(own, q_terms, k_terms, queries, rank, chunk, role);
      release();
      if constexpr (kByProducts) part.copy(own, i + kConsumers);
      continue;
    }
    sum_inter(queries, rank, y, keys.k[rank]);
    store_score_grads(keys.A, dA);  // A is read
    float exponents[32];
    if constexpr (kByProducts)
      wait_for_copies<0>();  // gates
    else
      part.read_exponents(exponents, own);
    fence_for_products();
    role_barrier(role);  // dA, gates and sum_inter's sums are written, or exponents read
    begin_products();
    if constexpr (kByProducts) {
      Triangle<Ones::kUpTo>(thread_index()).sum(exponents, own.tile, false);
      commit_products();
    }
    multiply<kSummed, kOther>(x, shared_address(keys.A), shared_address(keys.k[rank]));
    multiply<kOther, kOther>(y, shared_address(keys.A), shared_address(queries.q));
    commit_products();
    wait(&s.states_full[i % kQueryStages], i / kQueryStages & 1);
    part.sum_states(own, queries, rank);
    if constexpr (kByProducts) {
      wait_for_products<1>();
      part.make_exponents(exponents, queries, rank);
    }
    wait_for_products<0>();
    role_barrier(role);  // dA, q^, k^ and gates are read
    const GradientTiles tiles{keys.A, keys.k[rank], queries.q, keys.k[1 - rank]};
    finish(tiles, x, y, exponents, queries.q, keys.k[rank], p.scale);
    fence_for_products();
    role_barrier(role);  // what dg sums is written
    float dg[32];
    part.load_states(dg, own);
    begin_products();
    const Triangle<Ones::kFrom> ones(thread_index());
    ones.sum(dg, tiles.high, true);
    ones.sum(dg, tiles.low, true);
    commit_products();
    TileRows dq_rows, dk_rows, dg_rows;
    dq_rows.read(tiles.dq);
    dk_rows.read(tiles.dk);
    wait_for_products<0>();
    if constexpr (kByProducts) {
      store_tile(own.tile, dg);
      dg_rows.read(own.tile);
    }
    release();
    if constexpr (kByProducts)
      part.copy(own, i + kConsumers);
    else
      gates = part.load(i + kConsumers);
    dq_rows.write(p.dq, segment, chunk, rank * kTile, p.K);
    dk_rows.write(p.dk, segment, chunk, rank * kTile, p.K);
    if constexpr (kByProducts)
      dg_rows.write(p.dg, segment, chunk, rank * kTile, p.K);
    else
      part.write(dg, chunk);
  }
}

}  // namespace gla_ext::cuda::sm90::gradients::sweep
