// Sums of gates down the tokens of a chunk, by tensor cores: a lower triangle of ones times the
// gates, bf16 ones as they are, fp32 ones as two bf16 terms, which keep 17 bits. A decay 2^-x then
// has a relative error of x 2^-18 at most, where bf16 rounds what it is multiplied with by up to
// 2^-9. In natural units; fp32 accumulation.
//
// The triangle is in shared memory, which all producers of a block read. Its twin, triangle.cuh,
// has the ones in registers, for kernels without 8 KB to spare; channels.cuh sums without tensor
// cores.
#pragma once

#include "tiles.cuh"

namespace gla_ext::cuda::sm90 {

constexpr float kResetGate = -104.f;  // 2^(-104 log2 e) < 2^-150: a decay of 0 in fp32

// Tiles that gates lie in, one for each term.
template <class Gate>
constexpr int kGateTiles = sizeof(Gate) / sizeof(bf16);

// Raises eight gates to where a decay is 0, since 0 times -inf would be NaN. NaN stays NaN.
__device__ __forceinline__ void clamp_gates(uint4* eight) {
  const __nv_bfloat162 reset = __float2bfloat162_rn(kResetGate);
  uint4 x = *eight;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&x);
#pragma unroll
  for (int j = 0; j < 4; ++j) pairs[j] = __hmax2_nan(pairs[j], reset);
  *eight = x;
}
// The same for eight fp32 gates, four in each of two tiles. Their terms take their places.
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
// The same for columns [first, first + kColumns) of a tile, of both tiles where gates are fp32, by
// a warpgroup; kColumns is 32 or 64.
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

// Ones on and below the diagonal, a whole tile.
template <int kThreads>
__device__ __forceinline__ void fill_triangle(Tile& tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kTile / 2; i += kThreads) {
    const int row = i / (kTile / 2), column = i % (kTile / 2) * 2;
    in_tile<uint32_t>(tile, swizzled(row, column / 8) + column % 8 * 2) =
        pack(column <= row ? 1.f : 0.f, column + 1 <= row ? 1.f : 0.f);
  }
}

// b [64 tokens][kColumns], kColumns = 2 kN = the sums of the clamped gates, by a warpgroup. Waits.
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
