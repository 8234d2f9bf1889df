// Sums of gates down the tokens of a chunk, by tensor cores: a lower triangle of ones times the
// gates. bf16 gates are used as they are; fp32 gates become two bf16 terms, which keep 17 bits. A
// decay 2^-x then has a relative error of at most x 2^-18; the bf16 operand that it multiplies is
// rounded by up to 2^-9. The sums are in natural units, accumulated in fp32.
//
// The triangle is in shared memory, where all producers of a block read it. triangle.cuh does the
// same with the ones in registers, for kernels without 8 KB to spare; channels.cuh sums without
// tensor cores.
#pragma once

#include "tiles.cuh"

namespace gla_ext::cuda::sm90 {

constexpr float kResetGate = -104.f;  // 2^(-104 log2 e) < 2^-150: a decay of 0 in fp32

// Tiles that hold the gates of 64 channels: one for bf16, two for fp32, later one for each term.
template <class Gate>
constexpr int kGateTiles = sizeof(Gate) / sizeof(bf16);

// Raises eight gates to at least kResetGate, where the decay is 0, since 0 times -inf would be NaN.
// NaN stays NaN.
__device__ __forceinline__ void clamp_gates(uint4* eight) {
  const __nv_bfloat162 reset = __float2bfloat162_rn(kResetGate);
  uint4 x = *eight;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&x);
#pragma unroll
  for (int j = 0; j < 4; ++j) pairs[j] = __hmax2_nan(pairs[j], reset);
  *eight = x;
}
// Clamps eight fp32 gates, four in each of two tiles, and replaces them by their bf16 terms: the
// high ones in the first tile, the low ones in the second.
__device__ __forceinline__ void split_gates(uint4* high, uint4* low) {
  const uint4 words[2] = {*high, *low};
  const auto* gates = reinterpret_cast<const float*>(words);
  uint32_t terms[2][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float x[2];
#pragma unroll
    for (int e = 0; e < 2; ++e)
      x[e] = gates[2 * j + e] < kResetGate ? kResetGate : gates[2 * j + e];
    const float2 rounded = unpack(terms[0][j] = pack(x[0], x[1]));
    terms[1][j] = pack(x[0] - rounded.x, x[1] - rounded.y);
  }
  *high = make_uint4(terms[0][0], terms[0][1], terms[0][2], terms[0][3]);
  *low = make_uint4(terms[1][0], terms[1][1], terms[1][2], terms[1][3]);
}
// Clamps columns [first, first + kColumns) of a tile of gates (of both tiles for fp32 gates), by a
// warpgroup. kColumns is 32 or 64.
template <class Gate, int kColumns>
__device__ __forceinline__ void clamp_gates(Tile* tiles, int first, int thread) {
  constexpr int kVecs = kColumns / 8, kRowsEach = kGroupThreads / kVecs;
#pragma unroll
  for (int i = 0; i < kTile / kRowsEach; ++i) {
    const int place = swizzled(thread / kVecs + i * kRowsEach, first / 8 + thread % kVecs);
    if constexpr (kGateTiles<Gate> == 1)
      clamp_gates(&in_tile<uint4>(*tiles, place));
    else
      split_gates(&in_tile<uint4>(tiles[0], place), &in_tile<uint4>(tiles[1], place));
  }
}

// Fills a tile with ones on and below the diagonal, zeros above.
template <int kThreads>
__device__ __forceinline__ void fill_triangle(Tile& tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kTile / 2; i += kThreads) {
    const int row = i / (kTile / 2), column = i % (kTile / 2) * 2;
    in_tile<uint32_t>(tile, swizzled(row, column / 8) + column % 8 * 2) =
        pack(column <= row ? 1.f : 0.f, column + 1 <= row ? 1.f : 0.f);
  }
}

// Computes b [64 tokens][kColumns], kColumns = 2 kN, the sums of the clamped gates. Runs on a
// warpgroup and waits for the products.
template <class Gate, int kN>
__device__ __forceinline__ void sum_gates(float (&b)[kN], const Tile& triangle, const Tile& tile,
                                          int first_column) {
  const Operand ones = triangle, gates = Operand(tile).from_column(first_column);
  begin_products();
#pragma unroll
  for (int i = 0; i < 4 * kGateTiles<Gate>; ++i)
    product<Contiguous::kSummed, Contiguous::kOther>(b, sixteen_columns(ones, i % 4),
                                                     sixteen_rows(gates, i), i > 0);
  commit_products();
  wait_for_products<0>();
}

}  // namespace gla_ext::cuda::sm90
