// Stores accumulators as bf16 from a warp's registers directly to tiles or rows in memory, without
// going through shared memory.
#pragma once

#include "channels.cuh"

namespace gla_ext::cuda::sm90 {

// Transposes the words of four lanes: afterwards lane t holds word t of each of the four lanes, in
// lane order.
__device__ __forceinline__ void turn_quad(uint32_t (&words)[4], int thread) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (thread & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      uint32_t &low = words[i], &high = words[i + step];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? low : high, step);
      low = upper ? got : low;
      high = upper ? high : got;
    }
  }
}

// The accumulators [64][kColumns] of a warpgroup as bf16.
template <int kColumns>
class LaneRows {
 public:
  LaneRows() = default;
  __device__ __forceinline__ explicit LaneRows(const float (&x)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = 16 * i + 4 * j + 2 * e;
          words_[i][e][j] = pack(x[at], x[at + 1]);
        }
  }

  // Call only one of these, and once: the words are transposed in place. write_tiles stores to
  // tiles of 64 columns that are `next` tiles apart.
  __device__ __forceinline__ void write_tiles(Tile* tiles, int next) {
    const auto thread = static_cast<int>(threadIdx.x);
    const int offset = swizzled(row(thread), part(thread));
    for_eights(thread, [&](int i, int e, uint4 eight) {
      in_tile<uint4>(tiles[i / 2 * next], (offset ^ i % 2 * 64) + e * 8 * kRowBytes) = eight;
    });
  }
  // Stores `rows` rows of `columns` columns; rows are `stride` elements apart.
  __device__ __forceinline__ void write_rows(bf16* to, int stride, int rows, int columns) {
    const int thread = thread_index(), row = this->row(thread), first = 8 * part(thread);
    to += row * stride + first;
    for_eights(thread, [&](int i, int e, uint4 eight) {
      if (row + 8 * e < rows && first + 32 * i < columns)
        *reinterpret_cast<uint4*>(to + 8 * e * stride + 32 * i) = eight;
    });
  }

 private:
  // The first row that a thread writes, and its part of eight columns.
  static __device__ __forceinline__ int row(int thread) {
    return thread % kGroupThreads / 32 * 16 + thread % 32 / 4;
  }
  static __device__ __forceinline__ int part(int thread) { return thread % 4; }
  // Calls f(index of the 32 columns, 0 or 1 for the row or the eighth row after it, 8 of the
  // columns).
  template <class F>
  __device__ __forceinline__ void for_eights(int thread, F&& f) {
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        uint32_t (&eight)[4] = words_[i][e];
        turn_quad(eight, thread);
        f(i, e, make_uint4(eight[0], eight[1], eight[2], eight[3]));
      }
  }
  uint32_t words_[kColumns / 32][2][4];  // [32 columns][row, eighth row after it][8 columns]
};

}  // namespace gla_ext::cuda::sm90
