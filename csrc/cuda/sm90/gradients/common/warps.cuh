// For the gradient sweeps: barriers of a warpgroup, the positions of threads in accumulators, and
// copies of tiles between accumulators and the rows of a tensor.
#pragma once

#include "cuda/sm90/tiles/channels.cuh"

namespace gla_ext::cuda::sm90::gradients {

constexpr int kWarp = 32;  // threads
constexpr int kGroupWarps = kGroupThreads / kWarp;

// The barrier of the warpgroup `role`.
__device__ __forceinline__ void role_barrier(int role) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + role), "n"(kGroupThreads) : "memory");
}
// Arrives once for a warp. After ordinary loads, or writes by single lanes, every thread arrives
// instead, because NVIDIA's racecheck does not follow these through __syncwarp.
__device__ __forceinline__ void arrive_as_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) arrive(barrier);
}

// The i-th chunk of the sweep, which starts at the last chunk.
__device__ __forceinline__ int chunk_of(const Segment& segment, int i) {
  return segment.chunks - 1 - i;
}

// fp32 [token][64 of K] in two tiles, half of the tokens in each.
struct FloatTile {
  unsigned char *first, *second;  // as references, ptxas serialises products (C7511)
  __device__ __forceinline__ float2& at(int row, int column) const {
    return pair_at(reinterpret_cast<float*>(row < kTile / 2 ? first : second),
                   swizzled_float(row % (kTile / 2), column));
  }
};
__device__ __forceinline__ FloatTile float_tile(Tile* tiles) { return {tiles[0], tiles[1]}; }

// A thread's position in the accumulators of a warpgroup: rows `row` and row + 8, columns 2 t and 2
// t + 1 of every eight.
struct Lane {
  int row, t;
  __device__ __forceinline__ Lane() : Lane(thread_index()) {}
  __device__ __forceinline__ explicit Lane(int thread)
      : row(thread % kGroupThreads / kWarp * 16 + thread % kWarp / 4), t(thread % 4) {}
};

// Multiplies accumulators by one factor per row: by[0] for `row`, by[1] for row + 8.
__device__ __forceinline__ void scale_rows(float (&d)[32], const float (&by)[2]) {
#pragma unroll
  for (int e = 0; e < 32; ++e) d[e] *= by[e / 2 % 2];
}

// Stores accumulators as a tile of bf16.
__device__ __forceinline__ void store_tile(Tile& tile, const float (&d)[32]) {
  store_tile(Fragments(thread_index()), tile, d);
}

// A warp's 16 rows of a tile, where a thread has 16 bytes of every fourth row. A warp can read as
// rows what it has written by `store_tile`, without waiting for other warps.
struct WarpRows {
  static constexpr int kPieces = 8, kRowsEach = kWarp / kPieces, kRows = 16 / kRowsEach;
  int row, piece;  // of this thread's first 16 bytes
  __device__ __forceinline__ WarpRows()
      : row(thread_index() % kGroupThreads / kWarp * 16 + thread_index() % kWarp / kPieces),
        piece(thread_index() % kPieces) {}
  // Byte offset of this thread's j-th 16 bytes.
  __device__ __forceinline__ int offset(int j) const {
    return (swizzled(row, piece) + j * kRowsEach * kRowBytes) ^ (j % 2 * 64);
  }
  // The number of the chunk's rows from `row` on; 0 if the column does not exist.
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

// Rows in registers between a tile and an output.
struct TileRows {
  uint4 words[WarpRows::kRows];
  __device__ __forceinline__ void read(const Tile& tile) {
    const WarpRows at;
    __syncwarp();  // the tile is written
#pragma unroll
    for (int j = 0; j < WarpRows::kRows; ++j) words[j] = in_tile<uint4>(tile, at.offset(j));
  }
  // Writes the columns from `first` on.
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
