// Sums of gates down the tokens of a chunk, by tensor cores: a lower triangle of ones times the
// gates, which bf16 holds exactly. In natural units; fp32 accumulation.
#pragma once

#include "tiles.cuh"

namespace gla_ext::cuda::sm90 {

// Raises eight gates to where a decay is 0 in fp32, since 0 times -inf would be NaN. NaN stays NaN.
__device__ __forceinline__ void clamp_gates(uint4* eight) {
  const __nv_bfloat162 reset = __float2bfloat162_rn(-104.f);  // 2^(-104 log2 e) < 2^-150
  uint4 x = *eight;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&x);
#pragma unroll
  for (int j = 0; j < 4; ++j) pairs[j] = __hmax2_nan(pairs[j], reset);
  *eight = x;
}
// Those of columns [first, first + kColumns) of a tile, by a warpgroup; kColumns is 32 or 64.
template <int kColumns>
__device__ __forceinline__ void clamp_gates(unsigned char* tile, int first, int thread) {
  constexpr int kParts = kColumns / 8, kRowsEach = kGroupThreads / kParts;
#pragma unroll
  for (int i = 0; i < kTile / kRowsEach; ++i)
    clamp_gates(reinterpret_cast<uint4*>(
        tile + swizzled(thread / kParts + i * kRowsEach, first / 8 + thread % kParts)));
}

// Ones on and below the diagonal, a whole tile.
template <int kThreads>
__device__ __forceinline__ void fill_triangle(unsigned char* tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kTile / 2; i += kThreads) {
    const int row = i / (kTile / 2), column = i % (kTile / 2) * 2;
    *reinterpret_cast<uint32_t*>(tile + swizzled(row, column / 8) + column % 8 * 2) =
        pack(column <= row ? 1.f : 0.f, column + 1 <= row ? 1.f : 0.f);
  }
}

// b [64 tokens][kColumns], kColumns = 2 kN = the sums of the clamped gates, by a warpgroup. Waits.
template <int kN>
__device__ __forceinline__ void sum_gates(float (&b)[kN], const unsigned char* triangle,
                                          const unsigned char* tile, int first_column) {
  const uint32_t ones = shared_address(triangle), gates = shared_address(tile) + first_column * 2;
  begin_products();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    product<Contiguous::kSummed, Contiguous::kOther>(
        b, descriptor(ones + kStepBytes * i, 0), descriptor(gates + 2048 * i, kTileBytes), i > 0);
  commit_products();
  wait_for_products<0>();
}

}  // namespace gla_ext::cuda::sm90
