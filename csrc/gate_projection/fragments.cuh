// Products of 16 tokens, rank 16 and 8 columns; cuda/device/fragments.cuh shows their operands.
//
// A warp has four tiles of 8 columns. The assignment of columns to tiles is free: column c of tile
// j is column 8 (c / 2) + 2 j + c % 2 of the 32, so that a lane has eight neighbours, 8t to 8t + 7.
#pragma once

#include "cuda/device/fragments.cuh"
#include "cuda/device/rows.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda::gate {

using warp::bits_of, warp::lane_pair, warp::lane_row, warp::multiply;
using warp::rounded_pair, warp::transposed;

constexpr int kTokens = 16;   // tokens of a product
constexpr int kColumns = 32;  // columns of a warp
constexpr int kTiles = kColumns / 8;

__device__ __forceinline__ int column_of(int tile, int c) { return 8 * (c / 2) + 2 * tile + c % 2; }

// Loads two neighbours of a row of R elements; those that do not exist are zero.
template <Access kAccess, class T>
__device__ __forceinline__ uint32_t rank_pair(const GateProjection& p, const T* row, int first,
                                              bool there) {
  if (!there) return 0;
  if constexpr (kAccess == Access::kFast) return *reinterpret_cast<const uint32_t*>(row + first);
  uint32_t x = 0;
  if (first < p.rank) x = bits_of(row[first]);
  if (first + 1 < p.rank) x |= bits_of(row[first + 1]) << 16;
  return x;
}

// Loads h of 16 tokens.
template <Access kAccess, class T>
__device__ __forceinline__ void load_h(const GateProjection& p, int first, uint32_t (&a)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int row = first + lane_row() + e % 2 * 8;
    a[e] = rank_pair<kAccess>(p, static_cast<const T*>(p.h) + int64_t{row} * p.h_stride,
                              2 * lane_pair() + e / 2 * 8, row < static_cast<int>(p.rows));
  }
}

// The weights and bias from which z of a warp's columns is computed.
template <Access kAccess, class T>
struct Weights {
  uint32_t b[kTiles][2];
  Eight<T> bias;

  __device__ __forceinline__ Weights(const GateProjection& p, int64_t base) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int64_t column = base + column_of(j, lane_row());
#pragma unroll
      for (int e = 0; e < 2; ++e)
        b[j][e] = rank_pair<kAccess>(p, static_cast<const T*>(p.weight) + column * p.rank,
                                     2 * lane_pair() + 8 * e, column < p.width);
    }
    bias.clear();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t column = base + 8 * lane_pair() + i;
      const bool there = p.bias != nullptr && column < p.width;
      if (there) bias.set(i, static_cast<const T*>(p.bias)[column]);
    }
  }

  // Computes z of tile j; the bias of its columns is at 2 j in `of_columns`.
  template <class Bias>
  __device__ __forceinline__ void multiply_h(const uint32_t (&a)[4], const Bias& of_columns, int j,
                                             float (&z)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) z[e] = of_columns[2 * j + e % 2];
    multiply<T>(z, a, b[j][0], b[j][1]);
  }
};

// How many of this lane's eight columns exist.
__device__ __forceinline__ int valid_columns(const GateProjection& p, int64_t base) {
  const int64_t left = p.width - base - 8 * lane_pair();
  return left < 8 ? static_cast<int>(left) : 8;
}

// Calls f(Type<bf16 | half>, Constant<Access>).
template <class F>
void with_gate_access(const GateProjection& p, F&& f) {
  const auto with = [&](auto type) {
    if (p.aligned)
      f(type, Constant<Access::kFast>{});
    else
      f(type, Constant<Access::kGeneral>{});
  };
  if (p.dtype == DType::kBFloat16) return with(Type<bf16>{});
  with(Type<half>{});
}

}  // namespace gla_ext::cuda::gate
