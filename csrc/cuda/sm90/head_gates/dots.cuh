// The additional work of a sweep with dots: a product with the state in two bf16 terms, the dots of
// every token with the state, and in the sweep of dq the dots of the token pairs inside a chunk.
#pragma once

#include "cuda/sm90/forward/fused/barriers.cuh"
#include "cuda/sm90/forward/fused/multiply.cuh"
#include "cuda/sm90/tiles/products.cuh"
#include "cuda/sm90/tiles/scores.cuh"
#include "operands.cuh"

namespace gla_ext::cuda::sm90::head_gates {

struct Nothing {};

// What the producer needs for summing pairs.
template <int kStages>
struct PairSums {
  uint64_t made[kStages];  // barriers: w v^T is made, so o may overwrite v
  float rows[kTile];
  float columns[kGroupThreads / 32][kTile];  // of each warp's rows
};

template <Time kTime>
__device__ __forceinline__ float* dots_of(const Problem& p) {
  return static_cast<float*>(kTime == Time::kForward ? p.dq_intra.data : p.dk_intra.data);
}
__device__ __forceinline__ float* last_dots(const Problem& p) {
  return static_cast<float*>(p.dg_intra.data);
}

// Sums accumulators over the rows of a warp. Input: columns 8 j + 2 (lane % 4) and the next, in x[2
// j] and x[2 j + 1]. Result: the sums of columns 2 lane and the next, in x[0] and x[1].
__device__ __forceinline__ void sum_rows(float (&x)[16]) {
  fold_rows<4>(x);
  fold_rows<2>(x);
  fold_rows<1>(x);
}

// Key channels of a round. With four tiles of keys there are registers for only half as many.
constexpr int two_term_keys(int tiles) { return tiles == 4 ? 16 : 32; }
template <int kTiles>
using TwoTermOperand = uint32_t[2][2][two_term_keys(kTiles) / 16][4];

// Computes o^T = S^T q^T like multiply_state, with an operand of two terms. operand: room for two
// rounds.
template <int kTiles, int K>
__device__ __forceinline__ void multiply_two_terms(float (&o)[32], forward::State<K>& state,
                                                   forward::Leaving leaving, const Tile* q,
                                                   TwoTermOperand<kTiles>& operand, bool first) {
  constexpr int kKeys = two_term_keys(kTiles);
  static_assert(K / kKeys % 2 == 0);
#pragma unroll
  for (int round = 0; round < K / kKeys; ++round) {
    if (!first || round > 0) wait_for_products<1>();  // as in multiply_state
    const int key = round * kKeys;
    auto& terms = operand[round % 2];
    state.template pass<kKeys>(key, leaving, terms[0], terms[1]);
    begin_products();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
#pragma unroll
      for (int term = 0; term < 2; ++term)
        product(o, terms[term][i], sixteen_columns(*q, key / 16 + i),
                !first || round + i + term > 0);
    commit_products();
  }
}

// Sums w_i . o_i of every token over the values of a warp. w is [token][64 values] times its
// tokens' factors, rounded: exactly the operand that is added to the other sweep's state.
__device__ __forceinline__ void sum_dots(float (&sums)[kTile], const float (&o)[32], const Tile& w,
                                         const float* factors) {
  const int thread = thread_index() % kGroupThreads, lane = thread % 32;
  float x[16];
  for_transposed(w, lane, thread / 32, [&](int i, const uint32_t (&words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * i + half;  // first token 8 j
      const float2 f = pair_at(factors, 8 * j + 2 * (lane % 4));
      const float2 first = unpack(scaled(words[2 * half], f)),
                   second = unpack(scaled(words[2 * half + 1], f));
      x[2 * j] = first.x * o[4 * j] + second.x * o[4 * j + 2];
      x[2 * j + 1] = first.y * o[4 * j + 1] + second.y * o[4 * j + 3];
    }
  });
  sum_rows(x);
  pair_at(sums, 2 * lane) = make_float2(x[0], x[1]);
}

// The place of a block's sums in [B, entries, H, parts, 64 tokens]. First come the sums of all
// consumers of all blocks, then the pairs' sums of all blocks.
template <class BlockOfKernel>
__device__ __forceinline__ float* dots_at(const BlockOfKernel& s, const Problem& p, int chunk,
                                          int part) {
  const int parts = blocks_of(p.V, s.kValues) * (s.kConsumers + (s.kMakesPairs ? 1 : 0));
  return dots_of<BlockOfKernel::kTime>(p) + (s.segment.chunk_head(p, chunk) * parts + part) * kTile;
}

// Stores the consumer's sums to memory.
template <class BlockOfKernel>
__device__ __forceinline__ void store_dots(BlockOfKernel& s, const Problem& p, int chunk,
                                           int block_v, int group) {
  const int token = thread_index() % kGroupThreads;
  if (token >= kTile) return;
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kGroupThreads / 32; ++warp) sum += s.dots[group][warp][token];
  dots_at(s, p, chunk, block_v / kTile + group)[token] = sum;
}

// Sums over the pairs of tokens of the i-th chunk, for a block's channels: A_ij (w_i . v_j) is
// added to token i and subtracted from token j < i. Runs on the producer once A is in its place.
template <class BlockOfKernel>
__device__ __forceinline__ void sum_pairs(BlockOfKernel& s, const Problem& p, int i, int block_v,
                                          int thread) {
  constexpr int kHalf = kTile / 2;  // columns at a time
  const auto& stage = s.stages[i % s.kStages];
  const Fragments fragments(thread);
  const int lane = thread % 32, warp = thread / 32, row = warp * 16 + lane / 4;
  float rows[2] = {0, 0}, columns[16];
  if constexpr (BlockOfKernel::kKeysFirst)
    group_barrier<forward::kProducerBarrier>(0);  // the chunk's values have arrived
  else
    __syncwarp();  // the warp's rows of A are written
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float dots[kHalf / 2];
    begin_scores<kTile * BlockOfKernel::kConsumers, kHalf>(dots, stage.w, stage.v, kHalf * half);
    wait_for_products<0>();
    if (half == 1) arrive(&s.pairs.made[i % s.kStages]);
#pragma unroll
    for (int part = 0; part < kHalf / 16; ++part) {
      const int first = kHalf * half + 16 * part;  // column
      uint32_t words[4];
      fragments.load(words, s.A[i % s.kPlaces], first / 16);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int e = x % 2, j = 2 * part + x / 2, column = first + x / 2 * 8 + lane % 4 * 2;
        const float2 A = unpack(words[x]);
        const int below = row + 8 * e - column;
        const float y = below > 0 ? A.x * dots[4 * j + 2 * e] : 0.f;
        const float z = below > 1 ? A.y * dots[4 * j + 2 * e + 1] : 0.f;
        rows[e] += y + z;
        float* of_columns = columns + first / 4 + x / 2 * 2;
        of_columns[0] = e == 0 ? y : of_columns[0] + y;
        of_columns[1] = e == 0 ? z : of_columns[1] + z;
      }
    }
  }
  sum_rows(columns);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    rows[e] += __shfl_xor_sync(0xffffffffu, rows[e], 1);
    rows[e] += __shfl_xor_sync(0xffffffffu, rows[e], 2);
    if (lane % 4 == 0) s.pairs.rows[row + 8 * e] = rows[e];
  }
  pair_at(s.pairs.columns[warp], 2 * lane) = make_float2(columns[0], columns[1]);
  group_barrier<forward::kProducerBarrier>(0);  // the warps' sums are written
  if (thread >= kTile) return;
  float sum = s.pairs.rows[thread];
#pragma unroll
  for (int other = 0; other < kGroupThreads / 32; ++other) sum -= s.pairs.columns[other][thread];
  const int blocks = blocks_of(p.V, s.kValues);
  dots_at(s, p, chunk_of<BlockOfKernel::kTime>(s.segment, i),
          blocks * s.kConsumers + block_v / s.kValues)[thread] = sum;
}

// Stores S . dS of a consumer's values after the last token, one number per warp: [N, H, parts, 4].
template <class BlockOfKernel, class StateOfValues>
__device__ __forceinline__ void store_last_dot(BlockOfKernel& s, const Problem& p,
                                               StateOfValues& state, int block_v, int group) {
  if (!s.segment.last || p.dht == nullptr) return;
  const int64_t matrix = s.segment.n * p.H + s.segment.head;
  const float* dht = p.dht + matrix * p.K * p.V;
  float sum = 0;
  state.for_each([&](auto& part, int) {
    part.for_elements(p, block_v + kTile * group, thread_index(), [&](float y, int k, int v) {
      sum += y * dht[p.state_v_first ? v * p.K + k : k * p.V + v];
    });
  });
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  const int thread = thread_index() % kGroupThreads;
  const int parts = blocks_of(p.V, s.kValues) * s.kConsumers;
  if (thread % 32 == 0)
    last_dots(p)[(matrix * parts + block_v / kTile + group) * (kGroupThreads / 32) + thread / 32] =
        sum;
}

}  // namespace gla_ext::cuda::sm90::head_gates
