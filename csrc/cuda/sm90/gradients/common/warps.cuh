// For the gradient sweeps: barriers of a warpgroup, where its threads are in accumulators, and
// tiles between accumulators and the rows of a tensor.
#pragma once

#include "cuda/sm90/tiles/channels.cuh"

namespace gla_ext::cuda::sm90::gradients {

constexpr int kWarp = 32;  // threads
constexpr int kGroupWarps = kGroupThreads / kWarp;

// A barrier of a warpgroup.
__device__ __forceinline__ void role_barrier(int role) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + role), "n"(kGroupThreads) : "memory");
}
// One arrival of a warp. Where ordinary loads have read or single lanes have written, threads
// arrive one by one instead: NVIDIA's racecheck does not follow them through __syncwarp.
__device__ __forceinline__ void arrive_as_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) arrive(barrier);
}

// The i-th chunk of the sweep, from the last.
__device__ __forceinline__ int chunk_of(const Segment& segment, int i) {
  return segment.chunks - 1 - i;
}

// fp32 [token][64 of K], half of the tokens here and half there.
struct FloatTile {
  unsigned char *first, *second;  // tiles; as references, ptxas serialises products (C7511)
  __device__ __forceinline__ float2& at(int row, int column) const {
    return pair_at(reinterpret_cast<float*>(row < kTile / 2 ? first : second),
                   swizzled_float(row % (kTile / 2), column));
  }
};
__device__ __forceinline__ FloatTile float_tile(Tile* tiles) { return {tiles[0], tiles[1]}; }

// Where a thread is in the accumulators of a warpgroup: rows `row` and the eighth after it, columns
// 2 t and 2 t + 1 of every eight.
struct Lane {
  int row, t;
  __device__ __forceinline__ Lane() : Lane(thread_index()) {}
  __device__ __forceinline__ explicit Lane(int thread)
      : row(thread % kGroupThreads / kWarp * 16 + thread % kWarp / 4), t(thread % 4) {}
};

// Multiplies accumulators by a factor of each row: `by` of `row`, and of the eighth after it.
__device__ __forceinline__ void scale_rows(float (&d)[32], const float (&by)[2]) {
#pragma unroll
  for (int e = 0; e < 32; ++e) d[e] *= by[e / 2 % 2];
}

// Stores accumulators as a tile of bf16.
__device__ __forceinline__ void store_tile(Tile& tile, const float (&d)[32]) {
  store_tile(Fragments(thread_index()), tile, d);
}

// A warp's 16 rows of a tile, a thread 16 bytes of every fourth one: what a warp has written by
// `store_tile` it reads as rows without waiting for the others.
struct WarpRows {
  static constexpr int kPieces = 8, kRowsEach = kWarp / kPieces, kRows = 16 / kRowsEach;
  int row, piece;  // of the first
  __device__ __forceinline__ WarpRows()
      : row(thread_index() % kGroupThreads / kWarp * 16 + thread_index() % kWarp / kPieces),
        piece(thread_index() % kPieces) {}
  // Byte offset of the j-th.
  __device__ __forceinline__ int offset(int j) const {
    return (swizzled(row, piece) + j * kRowsEach * kRowBytes) ^ (j % 2 * 64);
  }
  // How many of the chunk's rows are left from `row` on; none if the column is not there.
  __device__ __forceinline__ int rows_of(const Segment& segment, int chunk, bool inside) const {
    return inside ? segment.length_of(chunk) - row : 0;
  }
  template <class T>
  __device__ __forceinline__ T* at(const Rows& r, const Segment& segment, int chunk,
                                   int first) const {
    return rows_at<T>(r, segment.row, segment.token_of(chunk), segment.head) +
           token_offset(r, row) + first + 8 * piece;
  }
};

// On their way from a tile to a chunk's rows of an output.
struct TileRows {
  uint4 words[WarpRows::kRows];
  __device__ __forceinline__ void read(const Tile& tile) {
    const WarpRows at;
    __syncwarp();  // the tile is written
#pragma unroll
    for (int j = 0; j < WarpRows::kRows; ++j) words[j] = in_tile<uint4>(tile, at.offset(j));
  }
  // From column `first` on.
  __device__ __forceinline__ void write(const Rows& r, const Segment& segment, int chunk, int first,
                                        int columns) const {
    const WarpRows at;
    const int rows = at.rows_of(segment, chunk, first + 8 * at.piece < columns);
    bf16* to = at.at<bf16>(r, segment, chunk, first);
#pragma unroll
    for (int j = 0; j < WarpRows::kRows; ++j, to += token_offset(r, WarpRows::kRowsEach))
      if (j * WarpRows::kRowsEach < rows) *reinterpret_cast<uint4*>(to) = words[j];
  }
};

}  // namespace gla_ext::cuda::sm90::gradients
