// What a sweep with dots does more: products of two terms, and the sums w_i . o_i of every token.
#pragma once

#include "cuda/sm90/forward/fused/multiply.cuh"
#include "operands.cuh"

namespace gla_ext::cuda::sm90::head_gates {

// w . o of what the state gives, and of all of o.
enum Dot { kOfState, kOfAll, kDots };

template <Time kTime>
__device__ __forceinline__ float* dots_of(const Problem& p) {
  return static_cast<float*>(kTime == Time::kForward ? p.dq_intra.data : p.dk_intra.data);
}
__device__ __forceinline__ float* last_dots(const Problem& p) {
  return static_cast<float*>(p.dg_intra.data);
}

// o^T = S^T q^T as multiply_state makes it, with an operand of two terms.
template <int K>
__device__ __forceinline__ void multiply_two_terms(float (&o)[32], forward::State<K>& state,
                                                   forward::Leaving leaving, const unsigned char* q,
                                                   forward::StateOperand& terms, bool first) {
#pragma unroll
  for (int key = 0; key < K; key += forward::kPartKeys) {
    wait_for_products<0>();  // the terms before are read
    state.template pass<forward::kPartKeys>(key, leaving, terms[0], terms[1]);
    const uint32_t step =
        shared_address(q) + key / kTile * kTileBytes + key % kTile / 16 * kStepBytes;
    begin_products();
#pragma unroll
    for (int i = 0; i < forward::kPartKeys / 16; ++i)
#pragma unroll
      for (int term = 0; term < 2; ++term)
        product(o, terms[term][i], descriptor(step + i * kStepBytes, 0),
                !first || key + i + term > 0);
    commit_products();
  }
}

// Moves the diagonal of A, in bf16's rounding, out of it. thread: of the producer.
template <int kColumns>
__device__ __forceinline__ void take_diagonal(float (&diagonal)[kTile], float (&A)[kColumns / 2],
                                              int first, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4, column = first + thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int at = row + i / 2 % 2 * 8;
    if (at != column + i / 4 * 8 + i % 2) continue;
    diagonal[at] = unpack(pack(A[i], 0.f)).x;
    A[i] = 0.f;
  }
}
// o_i += A_ii v_i
__device__ __forceinline__ void add_diagonal(float (&o)[32], const float* diagonal,
                                             const unsigned char* v) {
  const int thread = thread_index() % kGroupThreads, lane = thread % 32;
  for_transposed(v, lane, thread / 32, [&](int i, const uint32_t (&words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * i + half;  // tokens from 8 j on
      const float2 by = pair_at(diagonal, 8 * j + 2 * (lane % 4));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 x = unpack(words[2 * half + e]) * by;
        o[4 * j + 2 * e] += x.x;
        o[4 * j + 2 * e + 1] += x.y;
      }
    }
  });
}

// Sums w_i . o_i of every token over the values of a warp. w: [token][64 values].
__device__ __forceinline__ void sum_dots(float (&sums)[kTile], const float (&o)[32],
                                         const unsigned char* w) {
  const int thread = thread_index() % kGroupThreads, lane = thread % 32;
  for_transposed(w, lane, thread / 32, [&](int i, const uint32_t (&words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * i + half;  // tokens from 8 j on
      const float2 first = unpack(words[2 * half]), second = unpack(words[2 * half + 1]);
      float2 sum = make_float2(first.x * o[4 * j] + second.x * o[4 * j + 2],
                               first.y * o[4 * j + 1] + second.y * o[4 * j + 3]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, lanes);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, lanes);
      }
      if (lane < 4) pair_at(sums, 8 * j + 2 * lane) = sum;
    }
  });
}

// The consumer's sums of both kinds to memory: [B, slots, H, parts, kDots, 64 tokens].
template <class BlockOfKernel>
__device__ __forceinline__ void store_dots(BlockOfKernel& s, const Problem& p, int chunk,
                                           int block_v, int group) {
  const int thread = thread_index() % kGroupThreads, dot = thread / kTile, token = thread % kTile;
  const int parts = blocks_of(p.V, s.kValues) * s.kConsumers;
  const int64_t part = s.segment.chunk_head(p, chunk) * parts + block_v / kTile + group;
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kGroupThreads / 32; ++warp) sum += s.dots[group][dot][warp][token];
  dots_of<BlockOfKernel::kTime>(p)[part * (kDots * kTile) + thread] = sum;
}

// S . dS of a consumer's values after the last token, a number a warp: [N, H, parts, 4].
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
