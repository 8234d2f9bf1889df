// Accumulators in bf16 from the registers of a warp straight to memory, without shared memory.
#pragma once

#include "channels.cuh"

namespace gla_ext::cuda::sm90 {

// Transposes the words of four lanes: lane t is left with word t of all four, in the lanes' order.
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

// bf16 of accumulators [64][kColumns] of a warpgroup.
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

  // Call one of these, once: the words are transposed in place. To tiles of 64 columns, `next`
  // tiles apart.
  __device__ __forceinline__ void write_tiles(Tile* tiles, int next) {
    const auto thread = static_cast<int>(threadIdx.x);
    const int offset = swizzled(row(thread), part(thread));
    for_eights(thread, [&](int i, int e, uint4 eight) {
      in_tile<uint4>(tiles[i / 2 * next], (offset ^ i % 2 * 64) + e * 8 * kRowBytes) = eight;
    });
  }
  // To `rows` rows of `columns` columns, `stride` elements apart.
  __device__ __forceinline__ void write_rows(bf16* to, int stride, int rows, int columns) {
    const int thread = thread_index(), row = this->row(thread), first = 8 * part(thread);
    to += row * stride + first;
    for_eights(thread, [&](int i, int e, uint4 eight) {
      if (row + 8 * e < rows && first + 32 * i < columns)
        *reinterpret_cast<uint4*>(to + 8 * e * stride + 32 * i) = eight;
    });
  }

 private:
  // Where a thread writes first.
  static __device__ __forceinline__ int row(int thread) {
    return thread % kGroupThreads / 32 * 16 + thread % 32 / 4;
  }
  static __device__ __forceinline__ int part(int thread) { return thread % 4; }
  // f(which 32 columns, 0 or 1 for the eighth row after, 8 of the columns)
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
  uint32_t words_[kColumns / 32][2][4];  // 32 columns, a row or the eighth after it, 8 columns
};

}  // namespace gla_ext::cuda::sm90
