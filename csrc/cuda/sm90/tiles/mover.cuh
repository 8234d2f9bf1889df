// Moves tiles of 64 columns between shared and global memory, 16 bytes a thread at a time.
#pragma once

#include "channels.cuh"

namespace gla_ext::cuda::sm90 {

// How kGroups warpgroups share a tile of 64 columns: thread i takes part i % 8 (16 bytes) of row i
// / 8 and of every kStep-th row after it.
template <int kGroups>
struct Mover {
  static constexpr int kStep = kGroups * kGroupThreads / 8;
  int row, column, offset;  // offset: bytes in a tile

  __device__ __forceinline__ Mover() : Mover(thread_index()) {}
  __device__ __forceinline__ explicit Mover(int thread)
      : row(thread / 8), column(thread % 8 * 8), offset(swizzled(row, column / 8)) {}

  // Copies from `p`, the address of this thread's first 16 bytes. Rows from `rows` on become zero;
  // all rows do if not `inside`.
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
