// gradient_sweep.cu: a chunk's gradients, by a consumer.
#pragma once

#include "gates.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// Sums what the states that leave the chunk owe to k.
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

// x and y of a chunk to dq and dk, whose exponents are at `terms`; these become what dg sums.
__device__ __forceinline__ void finish(float (&x)[32], float (&y)[32], float* terms,
                                       const unsigned char* q, const unsigned char* k,
                                       float scale) {
  const int thread = thread_index();
  const Lane lane(thread);
  const Fragments fragments(thread);
  float2 exponents[16];  // all before the first of what takes their place
  const auto term = [&](int i) -> float2& {
    return pair_at(terms, swizzled_float(lane.row + i % 2 * 8, i / 2 * 8 + 2 * lane.t));
  };
#pragma unroll
  for (int i = 0; i < 16; ++i) exponents[i] = term(i);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t q_words[2][4], k_words[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      fragments.load(q_words[j], shared_address(q), 2 * half + j);
      fragments.load(k_words[j], shared_address(k), 2 * half + j);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int i = 8 * half + j, at = 2 * i;
      term(i) = unpack(q_words[j / 4][j % 4]) * make_float2(x[at], x[at + 1]) -
                unpack(k_words[j / 4][j % 4]) * make_float2(y[at], y[at + 1]);
      x[at] *= scale * exp2_ftz(exponents[i].x);
      x[at + 1] *= scale * exp2_ftz(exponents[i].y);
      y[at] *= exp2_ftz(-exponents[i].x);
      y[at + 1] *= exp2_ftz(-exponents[i].y);
    }
  }
}

// Outside tier 1: x or y to dq or dk, whose exponents are at `terms`, in their place.
__device__ __forceinline__ void finish_exact(const float (&d)[32], float* terms, float scale) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    float2& term = pair_at(terms, swizzled_float(lane.row + i / 2 % 2 * 8, i / 4 * 8 + 2 * lane.t));
    term = make_float2(d[i] * scale * exp2_ftz(term.x), d[i + 1] * scale * exp2_ftz(term.y));
  }
}

// Every other chunk.
template <class Gate, int kSlices>
__device__ __forceinline__ void consume(Shared& s, const Problem& p, int consumer, int rank) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  const Segment& segment = s.segment;
  const GatePart<Gate> part(p, segment, rank);
  Ring<kSliceStages> slice;
  if (consumer > 0) slice.template skip<kSlices>();
  const bool loads = threadIdx.x % kGroupThreads == 0;
  if (loads) {
    load_queries(s, p, consumer, rank);
    load_keys(s, p, consumer);
    if (consumer == 0) load_queries(s, p, kConsumers, rank);
  }
  auto gates = part.load(consumer);
#pragma unroll 1
  for (int i = consumer; i < segment.chunks; i += kConsumers) {
    // Made anew, and so are the addresses that follow from it: they take no registers between.
    const int self = i % kConsumers, role = kConsumer + self, chunk = chunk_of(segment, i);
    const uint32_t parity = i / kConsumers & 1;
    Own& own = s.own[self];
    Queries& queries = s.queries[i % kQueryStages];
    Keys& keys = s.keys[self];
    wait(&s.queries_full[i % kQueryStages], i / kQueryStages & 1);
    const bool exact = __any_sync(0xffffffffu, s.exact[i % kQueryStages].x);
    part.write_exponents(own, gates, chunk, exact, role);
    // Only when the other one has left them is the phase of a slice's barriers this chunk's.
    if (i > 0) wait(&s.turn[self], (i - 1) / kConsumers & 1);
    float x[32], y[32], dA[32];
    clear(x);
    clear(y);
    clear(dA);
#pragma unroll 1
    for (int j = 0; j < kSlices; ++j, slice.next()) {
      const Slice& values = s.slices[slice.stage];
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
      wait(&s.ready[slice.stage], slice.parity);
      begin_products();
      multiply<kSummed, kSummed>(y, shared_address(values.v), shared_address(values.dS));
      commit_products();
      const bool is_own = j % kPair == rank;
      const auto leave = [&] {
        wait_for_products<0>();
        arrive_as_warp(&s.empty[slice.stage]);
        if (is_own) arrive_as_warp(&s.empty[slice.stage]);  // dS~ was not sent
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
      const uint32_t other = shared_address(tile), mine = shared_address(values.dS);
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
      role_barrier(role);  // dv is written
      write_tile(p.dv, segment, chunk, j * kTile, p.V, tile, [&] {
        // What the other block's next bulk copy takes the place of is read: this fence, of all that
        // went before, and not the arrival, of this block's scope, says so to it.
        fence_for_products();
        __syncwarp();
        if (threadIdx.x % kWarp == 0)
          arrive_in_cluster(address_in(&s.empty[slice.stage], 1 - rank));
      });
    }
    slice.template skip<kSlices>();  // the other one's
    if (p.saved_states) {
      const float* enter = queries.factors[kEnter][rank] + 2 * Lane().t;
#pragma unroll
      for (int j = 0; j < 32; ++j) x[j] *= enter[j / 4 * 8 + j % 2];
    }
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
    if (exact) {
      wait(&s.states_full[self], parity);
      gates = part.load(i + kConsumers);
      role_barrier(role);  // k^ is read
      float* terms = reinterpret_cast<float*>(keys.k);
      part.write_exact_exponents(own, terms, chunk);
      role_barrier(role);
      finish_exact(x, own.terms, p.scale);
      finish_exact(y, terms, 1.f);
      role_barrier(role);
      part.write_exact_gradients(own, terms, queries, rank, chunk, role);
      release();
    } else {
      sum_inter(queries, rank, y, keys.k[rank]);
      {
        const Lane lane;
#pragma unroll
        for (int j = 0; j < 32; ++j)
          dA[j] = j / 4 * 8 + 2 * lane.t + j % 2 <= lane.row + j / 2 % 2 * 8 ? dA[j] : 0.f;
      }
      store_tile(keys.A, dA);  // A is read
      fence_for_products();
      role_barrier(role);  // dA is written
      begin_products();
      multiply<kSummed, kOther>(x, shared_address(keys.A), shared_address(keys.k[rank]));
      multiply<kOther, kOther>(y, shared_address(keys.A), shared_address(queries.q));
      commit_products();
      wait_for_products<0>();
      finish(x, y, own.terms, queries.q, keys.k[rank], p.scale);
      store_tile(keys.k[1 - rank], x);
      role_barrier(role);  // dq and what dg sums are written, dA is read
      store_tile(keys.A, y);
      write_tile(p.dq, segment, chunk, rank * kTile, p.K, keys.k[1 - rank], [] {});
      wait(&s.states_full[self], parity);
      const auto terms = part.read_terms(own, queries, rank);
      gates = part.load(i + kConsumers);
      role_barrier(role);  // dk and the sums are written
      write_tile(p.dk, segment, chunk, rank * kTile, p.K, keys.A, release);
      part.write_gradients(own, terms, chunk);
    }
  }
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
