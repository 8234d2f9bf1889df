// Linear maps of up to 32 rows: y = n(x) Wᵀ. n is the identity, an RMS norm of each row, or an RMS
// norm of each head times swish(gate). The result is y, silu(y) ⊙ y_up, or residual + y.
//
// grid    a block has 16 rows of the weights (8 of gate and 8 of up), a warp 128 of their columns,
//         or a multiple of 128; partial sums are added in order through shared memory
// reads   x, gate [rows, D], norm_weight [group], weights [N, D], residual [rows, N]
// writes  y [rows, N]
// Weights are the left operand of 16 x 8 x 16 products, rows of x the right one. Weights are loaded
// from memory to registers before the previous kernel ends. Of 32 columns, lane 4 g + t has 8 t to
// 8 t + 7 of weight rows g and g + 8, and of x's row g: one load of 16 bytes gives operands of two
// products (the order of columns in a product does not matter). n(x) is rounded as the separate
// norm operator rounds it. The order of every sum depends only on D, so a row's bits depend only on
// the row.
#pragma once

#include "cuda/device/capability.h"
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "operands.cuh"

namespace gla_ext::cuda::decode {

// Warps of a block: at most most_warps(), at least kLeastWarps. A block may have four tiles of 8
// rows of x, and needs a warp for each of them in `store_tile`.
constexpr int most_warps(bool has_norm) { return has_norm ? 8 : 22; }
constexpr int kLeastWarps = 4;
// The number of threads for the kernel's launch bounds. It lets three blocks of 8 warps share a
// multiprocessor's registers if up to 8 rows are normed, otherwise one or two.
constexpr int most_threads(int row_tiles, Before before) {
  if (before == Before::kNothing) return 32 * most_warps(/*has_norm=*/false);
  if (before == Before::kGatedNorm) return 512;
  return row_tiles == 1 ? 768 : row_tiles == 2 ? 384 : 32 * most_warps(/*has_norm=*/true);
}
// Whether a block takes several tiles of weights in sequence: the norm of many rows costs as much
// as their products, so it pays to use it for several tiles.
constexpr bool has_many_tiles(int row_tiles, Before before) {
  return row_tiles > 1 && before == Before::kNorm;
}
inline int warps_of(int D, bool has_norm) {
  const int chunks = (D + kChunkColumns - 1) / kChunkColumns, most = most_warps(has_norm);
  const int turns = (chunks + most - 1) / most, warps = (chunks + turns - 1) / turns;
  return warps < kLeastWarps ? kLeastWarps : warps;
}
inline int row_tiles_of(int rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : 4; }

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
    load_residual<T>(p, map, first_row, warp, added);
  float y[4]{};
#pragma unroll 4
  for (int i = 0; i < warps; ++i) {
    const float4 x = shared[(i * kTiles + warp) * 32 + lane];
    y[0] += x.x, y[1] += x.y, y[2] += x.z, y[3] += x.w;
  }
  store_results<T, kAfter>(p, map, first_row, warp, y, added);
}

// For 8.0 a register would spill.
constexpr bool kRowsMayStay = kMajor != 8;

template <class T, int kTiles, Before kBefore, After kAfter>
__global__ void __launch_bounds__(most_threads(kTiles, kBefore))
    linear_kernel(const __grid_constant__ DecodeLinear p) {
  extern __shared__ float4 shared[];
  float* s = reinterpret_cast<float*>(shared);
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const Places at(p, warps, kTiles, kBefore);
  constexpr bool kMany = has_many_tiles(kTiles, kBefore);
  sm90::release_next_kernel();

  // The previous kernel writes none of this.
  int index = static_cast<int>(blockIdx.x), column = warp * kChunkColumns;
  WeightTile<T, kAfter> tile(p, index);
  WeightChunk weights;
  weights.load(p, tile, column);
  if constexpr (kBefore != Before::kNothing)
    for (int i = static_cast<int>(threadIdx.x); i < p.group; i += static_cast<int>(blockDim.x))
      s[at.norm_weight + i] =
          p.norm_weight == nullptr ? 1.f : load_any(p.norm_weight, p.norm_dtype, i);

  sm90::await_previous_kernel();
  uint32_t added[2]{};  // loaded early if there are registers for it
  if constexpr (kAfter == After::kAddResidual && kTiles == 1)
    if (warp == 0) load_residual<T>(p, p.maps[tile.map], tile.first, 0, added);
  // Up to 8 rows stay in registers between the norm and the product; more rows are read again, from
  // L1.
  constexpr bool kStays = kTiles == 1 && kRowsMayStay;
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
    // If a warp has one chunk, n(x) is made once for all tiles of the block.
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

}  // namespace gla_ext::cuda::decode
