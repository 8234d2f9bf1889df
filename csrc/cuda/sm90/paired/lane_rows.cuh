// Tiles of a state in bf16 from the registers of a warp to memory, by way of no shared memory.
#pragma once

#include "../tiles.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// Of four lanes, a word of each: lane t is left with word t of all four, in the lanes' order.
__device__ __forceinline__ void turn_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      uint32_t &low = words[i], &high = words[i + step];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? low : high, step);
      low = upper ? got : low;
      high = upper ? high : got;
    }
  }
}

// bf16 of accumulators [64][kColumns] of a warpgroup.
template <int kColumns>
struct LaneRows {
  uint32_t words[kColumns / 32][2][4];  // 32 columns, a row or the eighth behind it, 8 columns

  __device__ __forceinline__ explicit LaneRows(const float (&x)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = 16 * i + 4 * j + 2 * e;
          words[i][e][j] = pack(x[at], x[at + 1]);
        }
  }

  // To tiles of 64 columns, `next` bytes apart.
  __device__ __forceinline__ void write(unsigned char* tiles, int next) {
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    const int offset = swizzled(thread / 32 * 16 + thread % 32 / 4, thread % 4);
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        uint32_t (&eight)[4] = words[i][e];
        turn_quad(eight);
        *reinterpret_cast<uint4*>(tiles + i / 2 * next + (offset ^ i % 2 * 64) + e * 1024) =
            make_uint4(eight[0], eight[1], eight[2], eight[3]);
      }
  }
};

}  // namespace
}  // namespace gla_ext::cuda::sm90
