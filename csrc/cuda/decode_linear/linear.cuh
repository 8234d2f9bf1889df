// Linear maps of up to 32 rows: y = n(x) Wᵀ, where n is nothing, an RMS norm of each row, or one of
// each head times swish(gate); then y, silu(y) ⊙ y_up, or residual + y.
//
// grid    a block has 16 rows of the weights (8 of gate and 8 of up), a warp 128 of their columns,
//         or several times 128; partial sums meet in shared memory and are added in order
// reads   x, gate [rows, D], norm_weight [group], weights [N, D], residual [rows, N]
// writes  y [rows, N]
// Weights are the left operand of 16 x 8 x 16 products, rows of x the right one, and go from memory
// to registers, before the kernel before has ended. In 32 columns, lane 4 g + t has 8 t to 8 t + 7
// of weight rows g and g + 8, and of x's row g: one load of 16 bytes makes operands of two products
// (the order of columns in a product does not matter). n(x) is rounded as the norm by itself rounds
// it. The order of every sum follows from D alone: a row's bits depend on nothing but the row.
#pragma once

#include "cuda/device/dynamic_shared.h"
#include "cuda/gate_projection/fragments.cuh"
#include "cuda/rms_norm_gate/activation.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "params.h"

namespace gla_ext::cuda::decode {

constexpr int kSteps = 4;  // of a warp at once
constexpr int kChunkColumns = kSteps * kDecodeStep;

// Warps of a block: at most, and at least as many as there are tiles of 8 rows of x.
constexpr int most_warps(bool has_norm) { return has_norm ? 8 : 22; }
constexpr int kLeastWarps = 4;
// Most threads, for the compiler: three blocks of 8 warps share a multiprocessor's registers where
// up to 8 rows are normed, one or two otherwise.
constexpr int most_threads(int row_tiles, Before before) {
  if (before == Before::kNothing) return 32 * most_warps(/*has_norm=*/false);
  if (before == Before::kGatedNorm) return 512;
  return row_tiles == 1 ? 768 : row_tiles == 2 ? 384 : 32 * most_warps(/*has_norm=*/true);
}
// Whether a block takes several tiles of weights, one after the other: the norm of many rows costs
// as much as their products.
constexpr bool has_many_tiles(int row_tiles, Before before) {
  return row_tiles > 1 && before == Before::kNorm;
}
inline int warps_of(int D, bool has_norm) {
  const int chunks = (D + kChunkColumns - 1) / kChunkColumns, most = most_warps(has_norm);
  const int turns = (chunks + most - 1) / most, warps = (chunks + turns - 1) / turns;
  return warps < kLeastWarps ? kLeastWarps : warps;
}
inline int row_tiles_of(int rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : 4; }

// Where parts of a block's shared memory start, in floats, after the partial sums: sums of squares
// of each row, of a chunk or, where heads are normed, of a step; and the norm's weight.
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

// Sixteen bytes of weights, which are read once.
__device__ __forceinline__ uint4 load_weights(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

// The 16 rows of weights of a block, at this lane's first column.
template <class T, After kAfter>
struct WeightTile {
  const T *upper, *lower;  // rows g and g + 8
  int map = 0, first;      // row of the map

  __device__ __forceinline__ WeightTile(const DecodeLinear& p, int tile) {
    const int g = gate::lane_row();
    if constexpr (kAfter == After::kStore) {
#pragma unroll
      for (int i = 1; i < kMostMaps; ++i)
        if (i < p.count && tile >= p.maps[i].first_tile) map = i;
    }
    const LinearMap& m = p.maps[map];
    first = (tile - m.first_tile) * (kAfter == After::kSwiglu ? 8 : 16);
    // Rows after the last one are read as it, and not stored.
    const auto row = [&](const void* weight, int i) {
      const int64_t there = i < m.width ? i : m.width - 1;
      return static_cast<const T*>(weight) + there * p.D + 8 * gate::lane_pair();
    };
    upper = row(m.weight, first + g);
    lower = kAfter == After::kSwiglu ? row(p.up, first + g) : row(m.weight, first + g + 8);
  }
};

// What a lane holds of a chunk of a tile's columns.
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

// Eight columns of row 8 n + g, zeros where there is no such row.
template <class T>
__device__ __forceinline__ Eight<T> load_row(const DecodeLinear& p, const void* from,
                                             int32_t stride, int n, int column) {
  const int row = 8 * n + gate::lane_row();
  Eight<T> x;
  x.clear();
  if (row < p.rows && column < p.D)
    x = load8_aligned(static_cast<const T*>(from) + row * stride + column + 8 * gate::lane_pair());
  return x;
}

// What a lane holds of a chunk of rows 8 n + g, all asked for at once.
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

// Sums of squares of a chunk's columns: of all, or of each step where heads are normed.
template <Before kBefore>
constexpr int kSums = kBefore == Before::kGatedNorm ? kSteps : 1;

// This lane's share of those of row 8 n + g.
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

// Leaves them in shared memory, summed over the lanes of a row.
template <Before kBefore>
__device__ __forceinline__ void store_squares(const float (&sums)[kSums<kBefore>], int n,
                                              int column, float* squares) {
#pragma unroll
  for (int i = 0; i < kSums<kBefore>; ++i) {
    float sum = sums[i];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int place = column / kChunkColumns * kSums<kBefore> + i;
    squares[place * kMostDecodeRows + 8 * n + gate::lane_row()] = sum;
  }
}

// 1 / rms of row 8 n + g over sums `first` to `first + count - 1`.
__device__ __forceinline__ float rstd_of(const DecodeLinear& p, const float* squares, int n,
                                         int first, int count) {
  const float* at = squares + first * kMostDecodeRows + 8 * n + gate::lane_row();
  float sum = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) sum += at[i * kMostDecodeRows];
  return rsqrtf(sum * p.per_group + p.eps);
}

// n(x) of eight columns, with the norm's weight of these.
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
      x.words[i] = gate::rounded_pair<T>(y[0], y[1]);
    }
  }
  return *reinterpret_cast<const uint4*>(x.words);
}

// sums += W n(x)ᵀ of a chunk. kHeld: `rows` has been loaded; else each step's are loaded here.
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
    if constexpr (kBefore == Before::kGatedNorm) {
      const int own = first / p.group, steps = p.group / kDecodeStep;
      if (own != group) rstd = rstd_of(p, s + at.squares, n, own * steps, steps);
      group = own, in_group = first - own * p.group;
    }
    const Eight<T> own_x = kHeld ? rows.x[i] : load_row<T>(p, p.x, p.x_stride, n, first);
    const uint4 x = operand<T, kBefore>(own_x, rows.gates[rows.kHasGate ? i : 0], rstd,
                                        s + at.norm_weight + in_group + 8 * gate::lane_pair());
    const uint4 u = weights.w[i][0], l = weights.w[i][1];
    gate::multiply<T>(sums, {u.x, l.x, u.y, l.y}, x.x, x.y);
    gate::multiply<T>(sums, {u.z, l.z, u.w, l.w}, x.z, x.w);
  }
}

// n(x) of a chunk of rows 8 n + g.
template <class T>
__device__ __forceinline__ void make_operands(const DecodeLinear& p, const float* norm_weight,
                                              const RowChunk<T, Before::kNorm>& rows, int column,
                                              float rstd, uint4 (&operands)[kSteps]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int first = column + i * kDecodeStep;
    if (first >= p.D) break;
    operands[i] = operand<T, Before::kNorm>(rows.x[i], rows.x[i], rstd,
                                            norm_weight + first + 8 * gate::lane_pair());
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
      gate::multiply<T>(sums[n], {u.x, l.x, u.y, l.y}, x.x, x.y);
      gate::multiply<T>(sums[n], {u.z, l.z, u.w, l.w}, x.z, x.w);
    }
  }
}

// What the results of a tile are added to, in this lane's places: rows of weights g and g + 8, rows
// 8 warp + 2 t + e of x, of a warp below kTiles.
template <class T, int kTiles>
__device__ __forceinline__ void load_residual(const DecodeLinear& p, const LinearMap& map,
                                              int first_row, uint32_t (&added)[2]) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int weight_row = first_row + gate::lane_row(), x_row = 8 * warp + 2 * gate::lane_pair();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = x_row + i % 2, r = weight_row + i / 2 * 8;
    if (warp < kTiles && row < p.rows && r < map.width)
      added[i / 2] |=
          uint32_t{bits_of(static_cast<const T*>(p.residual)[row * p.residual_stride + r])}
          << 16 * (i % 2);
  }
}

// Adds the warps' sums and stores the results of a tile.
template <class T, int kTiles, After kAfter>
__device__ __forceinline__ void store_tile(const DecodeLinear& p, const LinearMap& map,
                                           int first_row, float4* shared,
                                           const float (&sums)[kTiles][4], uint32_t (&added)[2]) {
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    shared[(warp * kTiles + n) * 32 + lane] =
        make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
  __syncthreads();  // sums of every warp are written
  if (warp >= kTiles) return;
  if constexpr (kAfter == After::kAddResidual && kTiles > 1)
    load_residual<T, kTiles>(p, map, first_row, added);
  float y[4]{};
#pragma unroll 4
  for (int i = 0; i < warps; ++i) {
    const float4 x = shared[(i * kTiles + warp) * 32 + lane];
    y[0] += x.x, y[1] += x.y, y[2] += x.z, y[3] += x.w;
  }
  const int weight_row = first_row + gate::lane_row(), x_row = 8 * warp + 2 * gate::lane_pair();
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

template <class T, int kTiles, Before kBefore, After kAfter>
__global__ void __launch_bounds__(most_threads(kTiles, kBefore))
    linear_kernel(const __grid_constant__ DecodeLinear p) {
  extern __shared__ float4 shared[];
  float* s = reinterpret_cast<float*>(shared);
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const Places at(p, warps, kTiles, kBefore);
  constexpr bool kMany = has_many_tiles(kTiles, kBefore);
  sm90::release_next_kernel();

  // Nothing of this has been written by the kernel before.
  int index = static_cast<int>(blockIdx.x), column = warp * kChunkColumns;
  WeightTile<T, kAfter> tile(p, index);
  WeightChunk weights;
  weights.load(p, tile, column);
  if constexpr (kBefore != Before::kNothing)
    for (int i = static_cast<int>(threadIdx.x); i < p.group; i += static_cast<int>(blockDim.x))
      s[at.norm_weight + i] =
          p.norm_weight == nullptr ? 1.f : load_any(p.norm_weight, p.norm_dtype, i);

  sm90::await_previous_kernel();
  uint32_t added[2]{};  // early, where registers are left
  if constexpr (kAfter == After::kAddResidual && kTiles == 1)
    load_residual<T, kTiles>(p, p.maps[tile.map], tile.first, added);
  // Up to 8 rows stay in registers between the norm and the product; more come out of L1 again.
  constexpr bool kStays = kTiles == 1;
  const int stride = warps * kChunkColumns;
  RowChunk<T, kBefore> rows;
  if constexpr (kStays) rows.load(p, 0, column);
  float rstd[kTiles]{};
  if constexpr (kBefore != Before::kNothing) {
    for (int from = column; from < p.D; from += stride) {
      float squares[kTiles][kSums<kBefore>];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (!kStays || from != column) rows.load(p, n, from);
        sum_squares(rows, squares[n]);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) store_squares<kBefore>(squares[n], n, from, s + at.squares);
    }
    __syncthreads();  // sums of squares are written
    if (kStays && column + stride < p.D) rows.load(p, 0, column);
    if constexpr (kBefore == Before::kNorm) {
      const int chunks = (p.D + kChunkColumns - 1) / kChunkColumns;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) rstd[n] = rstd_of(p, s + at.squares, n, 0, chunks);
    }
  }

  if constexpr (!kMany) {
    float sums[kTiles][4]{};
    while (column < p.D) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        constexpr bool kHeld = kStays || kBefore != Before::kNothing;
        if (!kStays && kHeld) rows.load(p, n, column);
        multiply_chunk<kHeld>(p, at, s, weights, rows, n, column, rstd[n], sums[n]);
      }
      column += stride;
      if (column < p.D) {
        weights.load(p, tile, column);
        if (kStays) rows.load(p, 0, column);
      }
    }
    store_tile<T, kTiles, kAfter>(p, p.maps[tile.map], tile.first, shared, sums, added);
  } else {
    // n(x) is made once for all tiles of the block, where a warp has one chunk.
    uint4 operands[kTiles][kSteps];
    const int step = static_cast<int>(gridDim.x);
    for (bool first = true; index < p.tiles; index += step, first = false) {
      float sums[kTiles][4]{};
      int from = column;
      while (from < p.D) {
        if (first || stride < p.D) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            rows.load(p, n, from);
            make_operands(p, s + at.norm_weight, rows, from, rstd[n], operands[n]);
          }
        }
        multiply_operands<T>(p, weights, operands, from, sums);
        from += stride;
        if (from < p.D) weights.load(p, tile, from);
      }
      const int map = tile.map, first_row = tile.first;
      const bool more = index + step < p.tiles;
      if (more) {
        tile = WeightTile<T, kAfter>(p, index + step);
        weights.load(p, tile, column);
      }
      store_tile<T, kTiles, kAfter>(p, p.maps[map], first_row, shared, sums, added);
      if (more) __syncthreads();  // sums are read
    }
  }
}

template <class T, int kTiles, Before kBefore, After kAfter>
void launch_linear(const DecodeLinear& p, cudaStream_t stream) {
  const auto kernel = linear_kernel<T, kTiles, kBefore, kAfter>;
  static const DynamicShared shared(kernel, kMostDecodeBytes);
  const size_t bytes = decode_linear_bytes(p, kBefore);
  if (bytes > size_t{48} << 10) shared.allow();
  const int threads = 32 * warps_of(p.D, kBefore != Before::kNothing);
  constexpr bool kMany = has_many_tiles(kTiles, kBefore);
  const int blocks = kMany && p.tiles > p.processors ? p.processors : p.tiles;
  if (p.overlaps)
    sm90::launch_dependent(kernel, blocks, threads, bytes, stream, p);
  else
    kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(p);
}

template <Before kBefore, After kAfter>
void launch_linear(const DecodeLinear& p, cudaStream_t stream) {
  const auto with = [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.rows <= 8) return launch_linear<T, 1, kBefore, kAfter>(p, stream);
    if (p.rows <= 16) return launch_linear<T, 2, kBefore, kAfter>(p, stream);
    launch_linear<T, 4, kBefore, kAfter>(p, stream);
  };
  if (p.dtype == DType::kBFloat16) return with(Type<bf16>{});
  with(Type<half>{});
}

}  // namespace gla_ext::cuda::decode
