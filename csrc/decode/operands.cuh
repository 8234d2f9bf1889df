// A lane's parts of the weights and of the rows in linear.cuh, the norm of the rows, and the
// products of weights and rows.
#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/device/fragments.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda::decode {

constexpr int kSteps = 4;  // steps of a warp at once
constexpr int kChunkColumns = kSteps * kDecodeStep;

// Offsets in floats in a block's shared memory, after the partial sums: the sums of squares of each
// row, per chunk or, for norms of heads, per step; and the norm's weight.
struct Places {
  int squares, norm_weight, end;

  __host__ __device__ Places(const DecodeLinear& p, int warps, int row_tiles, Before before) {
    const int chunks = (p.D + kChunkColumns - 1) / kChunkColumns;
    const int count = before == Before::kNothing ? 0
                      : before == Before::kNorm  ? chunks
                                                 : kSteps * chunks;
    squares = warps * row_tiles * 128;
    norm_weight = squares + count * kMostDecodeRows;
    end = norm_weight + (before == Before::kNothing ? 0 : p.group);
  }
};

// Loads 16 bytes of weights, which are read only once.
__device__ __forceinline__ uint4 load_weights(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

// The 16 rows of weights of a block, starting at this lane's first column.
template <class T, After kAfter>
struct WeightTile {
  const T *upper, *lower;  // rows g and g + 8
  int map = 0, first;      // first: row of the map

  __device__ __forceinline__ WeightTile(const DecodeLinear& p, int tile) {
    const int g = warp::lane_row();
    if constexpr (kAfter == After::kStore) {
#pragma unroll
      for (int i = 1; i < kMostMaps; ++i)
        if (i < p.count && tile >= p.maps[i].first_tile) map = i;
    }
    const LinearMap& m = p.maps[map];
    first = (tile - m.first_tile) * (kAfter == After::kSwiglu ? 8 : 16);
    // Rows after the last one are read from the last one, and not stored.
    const auto row = [&](const void* weight, int i) {
      const int64_t there = i < m.width ? i : m.width - 1;
      return static_cast<const T*>(weight) + there * p.D + 8 * warp::lane_pair();
    };
    upper = row(m.weight, first + g);
    lower = kAfter == After::kSwiglu ? row(p.up, first + g) : row(m.weight, first + g + 8);
  }
};

// A lane's part of a chunk of a tile's columns.
struct WeightChunk {
  uint4 w[kSteps][2];

  template <class Tile>
  __device__ __forceinline__ void load(const DecodeLinear& p, const Tile& tile, int column) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (column + s * kDecodeStep >= p.D) break;
      w[s][0] = load_weights(tile.upper + column + s * kDecodeStep);
      w[s][1] = load_weights(tile.lower + column + s * kDecodeStep);
    }
  }
};

// Loads eight columns of row 8 n + g; gives zeros if there is no such row.
template <class T>
__device__ __forceinline__ Eight<T> load_row(const DecodeLinear& p, const void* from,
                                             int32_t stride, int n, int column) {
  const int row = 8 * n + warp::lane_row();
  Eight<T> x;
  x.clear();
  if (row < p.rows && column < p.D)
    x = load8_aligned(static_cast<const T*>(from) + row * stride + column + 8 * warp::lane_pair());
  return x;
}

// A lane's part of a chunk of rows 8 n + g, all loaded at once.
template <class T, Before kBefore>
struct RowChunk {
  static constexpr bool kHasGate = kBefore == Before::kGatedNorm;
  Eight<T> x[kSteps], gates[kHasGate ? kSteps : 1];

  __device__ __forceinline__ void load(const DecodeLinear& p, int n, int column) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      x[i] = load_row<T>(p, p.x, p.x_stride, n, column + i * kDecodeStep);
      if constexpr (kHasGate)
        gates[i] = load_row<T>(p, p.gate, p.gate_stride, n, column + i * kDecodeStep);
    }
  }
};

// The number of sums of squares in a chunk: one, or one per step for norms of heads.
template <Before kBefore>
constexpr int kSums = kBefore == Before::kGatedNorm ? kSteps : 1;

// Computes this lane's part of the sums of row 8 n + g.
template <class T, Before kBefore>
__device__ __forceinline__ void sum_squares(const RowChunk<T, kBefore>& rows,
                                            float (&sums)[kSums<kBefore>]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    float& sum = sums[kSums<kBefore> == 1 ? 0 : i];
    if (i < kSums<kBefore>) sum = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(rows.x[i][e], rows.x[i][e], sum);
  }
}

// The sum over the lanes of a row; each of these lanes gets it.
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// Stores the sums of rows in shared memory.
template <Before kBefore>
__device__ __forceinline__ void store_squares(const float (&sums)[kSums<kBefore>], int n,
                                              int column, float* squares) {
#pragma unroll
  for (int i = 0; i < kSums<kBefore>; ++i) {
    const int place = column / kChunkColumns * kSums<kBefore> + i;
    squares[place * kMostDecodeRows + 8 * n + warp::lane_row()] = sum_of_row(sums[i]);
  }
}

// 1 / rms of row 8 n + g over sums `first` to `first + count - 1`.
__device__ __forceinline__ float rstd_of(const DecodeLinear& p, const float* squares, int n,
                                         int first, int count) {
  const float* at = squares + first * kMostDecodeRows + 8 * n + warp::lane_row();
  float sum = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) sum += at[i * kMostDecodeRows];
  return rsqrtf(sum * p.per_group + p.eps);
}

// Returns the group of columns that contains `first`. If it is not `group`, also computes its 1 /
// rms of row 8 n + g.
__device__ __forceinline__ int take_group(const DecodeLinear& p, const float* squares, int n,
                                          int first, int& group, float& rstd) {
  const int own = first / p.group, steps = p.group / kDecodeStep;
  if (own != group) rstd = rstd_of(p, squares, n, own * steps, steps);
  return group = own;
}

// n(x) of eight columns; w: the norm's weight for these.
template <class T, Before kBefore>
__device__ __forceinline__ uint4 operand(Eight<T> x, const Eight<T>& gates, float rstd,
                                         const float* w) {
  if constexpr (kBefore != Before::kNothing) {
    const float4 w0 = reinterpret_cast<const float4*>(w)[0];
    const float4 w1 = reinterpret_cast<const float4*>(w)[1];
    const float ws[8]{w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        y[e] = x[2 * i + e] * rstd * ws[2 * i + e];
        if constexpr (kBefore == Before::kGatedNorm) {
          const float z = gates[2 * i + e];
          y[e] *= z * sigmoid<T>(z);
        }
      }
      x.words[i] = warp::rounded_pair<T>(y[0], y[1]);
    }
  }
  return *reinterpret_cast<const uint4*>(x.words);
}

// sums += W n(x)ᵀ of a chunk. kHeld: `rows` is already loaded; otherwise the rows of each step are
// loaded here.
template <bool kHeld, class T, Before kBefore>
__device__ __forceinline__ void multiply_chunk(const DecodeLinear& p, const Places& at,
                                               const float* s, const WeightChunk& weights,
                                               const RowChunk<T, kBefore>& rows, int n, int column,
                                               float rstd, float (&sums)[4]) {
  int group = -1;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int first = column + i * kDecodeStep;
    if (first >= p.D) break;
    int in_group = first;
    if constexpr (kBefore == Before::kGatedNorm)
      in_group -= take_group(p, s + at.squares, n, first, group, rstd) * p.group;
    const Eight<T> own_x = kHeld ? rows.x[i] : load_row<T>(p, p.x, p.x_stride, n, first);
    const uint4 x = operand<T, kBefore>(own_x, rows.gates[rows.kHasGate ? i : 0], rstd,
                                        s + at.norm_weight + in_group + 8 * warp::lane_pair());
    const uint4 u = weights.w[i][0], l = weights.w[i][1];
    warp::multiply<T>(sums, {u.x, l.x, u.y, l.y}, x.x, x.y);
    warp::multiply<T>(sums, {u.z, l.z, u.w, l.w}, x.z, x.w);
  }
}

// Makes n(x) of a chunk of rows 8 n + g.
template <class T>
__device__ __forceinline__ void make_operands(const DecodeLinear& p, const float* norm_weight,
                                              const RowChunk<T, Before::kNorm>& rows, int column,
                                              float rstd, uint4 (&operands)[kSteps]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int first = column + i * kDecodeStep;
    if (first >= p.D) break;
    operands[i] = operand<T, Before::kNorm>(rows.x[i], rows.x[i], rstd,
                                            norm_weight + first + 8 * warp::lane_pair());
  }
}

// sums += W n(x)ᵀ of a chunk.
template <class T, int kTiles>
__device__ __forceinline__ void multiply_operands(const DecodeLinear& p, const WeightChunk& weights,
                                                  const uint4 (&operands)[kTiles][kSteps],
                                                  int column, float (&sums)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (column + i * kDecodeStep >= p.D) break;
    const uint4 u = weights.w[i][0], l = weights.w[i][1];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint4 x = operands[n][i];
      warp::multiply<T>(sums[n], {u.x, l.x, u.y, l.y}, x.x, x.y);
      warp::multiply<T>(sums[n], {u.z, l.z, u.w, l.w}, x.z, x.w);
    }
  }
}

// Loads the residual to which the results of a tile and rows 8 n to 8 n + 7 of x are added. This
// lane has rows of weights g and g + 8, rows 8 n + 2 t + e of x.
template <class T>
__device__ __forceinline__ void load_residual(const DecodeLinear& p, const LinearMap& map,
                                              int first_row, int n, uint32_t (&added)[2]) {
  const int weight_row = first_row + warp::lane_row(), x_row = 8 * n + 2 * warp::lane_pair();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = x_row + i % 2, r = weight_row + i / 2 * 8;
    if (row < p.rows && r < map.width)
      added[i / 2] |=
          uint32_t{bits_of(static_cast<const T*>(p.residual)[row * p.residual_stride + r])}
          << 16 * (i % 2);
  }
}

// Stores the results of sums y, in the same positions.
template <class T, After kAfter>
__device__ __forceinline__ void store_results(const DecodeLinear& p, const LinearMap& map,
                                              int first_row, int n, const float (&y)[4],
                                              const uint32_t (&added)[2]) {
  const int weight_row = first_row + warp::lane_row(), x_row = 8 * n + 2 * warp::lane_pair();
  T* out = static_cast<T*>(map.y);
#pragma unroll
  for (int i = 0; i < (kAfter == After::kSwiglu ? 2 : 4); ++i) {
    const int row = x_row + i % 2, r = weight_row + i / 2 * 8;
    float result = y[i];
    if constexpr (kAfter == After::kSwiglu) result *= sigmoid<T>(y[i]) * y[2 + i % 2];
    if constexpr (kAfter == After::kAddResidual) result += element_of<T>(added, i);
    if (row < p.rows && r < map.width) out[int64_t{row} * map.width + r] = from_float<T>(result);
  }
}

}  // namespace gla_ext::cuda::decode
