// The state in the registers of a warpgroup, in the sweeps of backward.
#pragma once

#include "barriers.cuh"
#include "cuda/sm90/tiles/sweep.cuh"

namespace gla_ext::cuda::sm90::states {

// The part of the state that a consumer holds: 64 key channels by 128 or 64 values.
template <int K>
struct State {
  static constexpr int kValues = K;  // values of a consumer; K is 128 or 64
  float x[kValues / 2];
  int first_k, first_v;

  __device__ __forceinline__ State(int member, int block_k, int block_v)
      : first_k(K == 128 ? block_k + 64 * member : block_k),
        first_v(K == 128 ? block_v : block_v + 64 * member) {}

  // Calls f(x0, x1, key, value) for pairs of neighbouring values.
  template <class F>
  __device__ __forceinline__ void for_pairs(const Problem& p, F&& f) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kValues / 2; i += 2) {
      const int k = first_k + row + i / 2 % 2 * 8, v = first_v + i / 4 * 8 + 2 * (lane % 4);
      if (k < p.K && v < p.V) f(x[i], x[i + 1], k, v);
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) x[i] = 0;
  }
  __device__ __forceinline__ void load(const Problem& p, const float* state, bool v_first) {
    if (state == nullptr) return;
    for_pairs(p, [&](float& x0, float& x1, int k, int v) {
      x0 = state[v_first ? v * p.K + k : k * p.V + v];
      x1 = state[v_first ? (v + 1) * p.K + k : k * p.V + v + 1];
    });
  }
  __device__ __forceinline__ void store(const Problem& p, float* state, bool v_first) {
    for_pairs(p, [&](float x0, float x1, int k, int v) {
      if (v_first) {
        state[v * p.K + k] = x0;
        state[(v + 1) * p.K + k] = x1;
      } else {
        *reinterpret_cast<float2*>(state + k * p.V + v) = make_float2(x0, x1);
      }
    });
  }

  // Stores one chunk's state as bf16 rows [K][V], by way of `tiles`, which only this warpgroup
  // uses.
  __device__ __forceinline__ void store_chunk(bf16* state, Tile* tiles, const Problem& p,
                                              int group) const {
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    const Fragments fragments;
    group_barrier<kConsumerBarrier>(group);  // the rows of the previous chunk are read
#pragma unroll
    for (int i = 0; i < kValues / kTile; ++i) store_tile(fragments, tiles[i], x + 32 * i);
    group_barrier<kConsumerBarrier>(group);  // the rows are written
    constexpr int kVecs = kValues / 8, kRowsEach = kGroupThreads / kVecs;
    const int part = thread % kVecs, v = first_v + 8 * part;
#pragma unroll
    for (int i = 0; i < kTile / kRowsEach; ++i) {
      const int row = thread / kVecs + i * kRowsEach, k = first_k + row;
      if (k < p.K && v < p.V)
        *reinterpret_cast<uint4*>(state + k * p.V + v) =
            in_tile<uint4>(tiles[part / 8], swizzled(row, part % 8));
    }
  }
};

}  // namespace gla_ext::cuda::sm90::states
