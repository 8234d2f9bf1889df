// Tiles of 64 columns and rows in memory, 16 bytes a thread.
#pragma once

#include "channels.cuh"

namespace gla_ext::cuda::sm90 {

// How kGroups warpgroups move a tile of 64 columns, a row's 16 bytes each: thread i has part i % 8
// of row i / 8 and of every kStep-th row after it.
template <int kGroups>
struct Mover {
  static constexpr int kStep = kGroups * kGroupThreads / 8;
  int row, column, offset;  // offset: bytes in a tile

  __device__ __forceinline__ Mover() : Mover(thread_index()) {}
  __device__ __forceinline__ explicit Mover(int thread)
      : row(thread / 8), column(thread % 8 * 8), offset(swizzled(row, column / 8)) {}

  // From `p`, this thread's first 16 bytes, zero from row `rows` on or where nothing is `inside`.
  template <int kRows>
  __device__ __forceinline__ void copy(const Tile* tile, const bf16* p, int32_t stride, int rows,
                                       bool inside) const {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const bool there = inside && row + i * kStep < rows;
      copy16(shared_address(tile) + offset + i * kStep * kRowBytes, p + i * kStep * stride, there);
    }
  }
  __device__ __forceinline__ void store(bf16* p, const Tile& tile, int32_t stride, int rows,
                                        bool inside) const {
#pragma unroll
    for (int i = 0; i < kTile / kStep; ++i)
      if (inside && row + i * kStep < rows)
        *reinterpret_cast<uint4*>(p + i * kStep * stride) =
            in_tile<uint4>(tile, offset + i * kStep * kRowBytes);
  }
};

}  // namespace gla_ext::cuda::sm90
