// A block's tile of a state in the registers of backward: each thread has eight keys of four
// values.
#pragma once

#include "run.cuh"

namespace gla_ext::cuda {

constexpr int kBlockThreads = 256;
constexpr int kKeptTokens = 32, kReplayTokens = 2;
constexpr int kThreadKeys = 8, kThreadValues = 4;

// This thread's part of a state, eight keys by four values.
struct Tile {
  float x[kThreadKeys][kThreadValues];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kThreadKeys; ++i)
#pragma unroll
      for (int c = 0; c < kThreadValues; ++c) x[i][c] = 0;
  }
  // In memory, a tile is stored in the order of the threads.
  __device__ __forceinline__ void load(const float* tile) {
#pragma unroll
    for (int i = 0; i < kThreadKeys; ++i) {
      const float4 y = reinterpret_cast<const float4*>(tile)[i * kBlockThreads + threadIdx.x];
      x[i][0] = y.x, x[i][1] = y.y, x[i][2] = y.z, x[i][3] = y.w;
    }
  }
  __device__ __forceinline__ void store(float* tile) const {
#pragma unroll
    for (int i = 0; i < kThreadKeys; ++i)
      reinterpret_cast<float4*>(tile)[i * kBlockThreads + threadIdx.x] =
          make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
  }
};

// Adds the numbers of lanes that differ in `mask`. Each lane keeps the sums of half of the numbers;
// the upper lane keeps the upper half.
template <int kN>
__device__ __forceinline__ void reduce_halves(float* x, int mask) {
  const bool upper = (threadIdx.x & mask) != 0;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const float mine = upper ? x[i + kN / 2] : x[i], other = upper ? x[i] : x[i + kN / 2];
    x[i] = mine + __shfl_xor_sync(0xffffffffu, other, mask);
  }
}

// Some numbers of a row in shared memory, loaded into registers in fours.
template <int kN>
struct Fours {
  float x[kN];

  __device__ __forceinline__ explicit Fours(const float* row) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const float4 y = reinterpret_cast<const float4*>(row)[i];
      x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
    }
  }
  __device__ __forceinline__ float operator[](int i) const { return x[i]; }
};
using Keys = Fours<kThreadKeys>;
using Values = Fours<kThreadValues>;

}  // namespace gla_ext::cuda
