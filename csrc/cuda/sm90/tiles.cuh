// Tiles of 64 rows by 64 bf16 columns in shared memory as warpgroup products read them, and the
// copies that fill them.
#pragma once

#include "../device/tile.cuh"
#include "ptx.cuh"
#include "segment.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kGroupThreads = 128;             // of a warpgroup
constexpr int kTileBytes = kTile * kTile * 2;  // [64][64] bf16
constexpr int kStepBytes = 16 * 2;             // 16 columns of a row: what one product sums over

// Byte offset of 16 bytes in a tile, as `descriptor` reads it.
__device__ __forceinline__ int swizzled(int row, int part) {
  return row * 128 + ((part ^ (row & 7)) << 4);
}

__device__ __forceinline__ uint32_t pack(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Copies columns [first, first + 64 kTiles) of one tensor, chunk after chunk of a segment, by the
// first kThreads threads of a block.
template <int kTiles, int kThreads>
class RowCopier {
 public:
  // Backwards: last chunk first.
  __device__ __forceinline__ RowCopier(const Rows& r, const Segment& segment, int first,
                                       int columns, bool backwards = false)
      : stride_(static_cast<int32_t>(r.stride_t)), backwards_(backwards) {
    const int thread = static_cast<int>(threadIdx.x), part = thread % kParts;
    row_ = thread / kParts;
    inside_ = first + 8 * part < columns;
    const int64_t token = segment.token_of(backwards ? segment.chunks - 1 : 0);
    p_ = rows_at<const bf16>(r, segment.row, token, segment.head) + token_offset(r, row_) +
         (inside_ ? first + 8 * part : 0);
    shared_ = part / 8 * kTileBytes + swizzled(row_, part % 8);
  }

  // The next chunk's `length` rows, zero where there is nothing.
  __device__ __forceinline__ void copy(const unsigned char* tile, int length) {
    const uint32_t shared = shared_address(tile) + shared_;
    const bf16* p = p_;
#pragma unroll
    for (int i = 0; i < kTile / kRowsEach; ++i) {
      const bool there = inside_ && row_ + i * kRowsEach < length;
      copy16(shared + i * kRowsEach * 128, there ? p : p_, there);
      p += stride_ * kRowsEach;
    }
    p_ += static_cast<int64_t>(stride_) * (backwards_ ? -kTile : kTile);
  }

 private:
  static constexpr int kParts = kTiles * 8, kRowsEach = kThreads / kParts;
  static_assert(kTile % kRowsEach == 0, "every thread copies as many parts");
  static_assert(kRowsEach % 8 == 0, "rows of a thread are swizzled alike");
  const bf16* p_;
  int32_t stride_;
  uint32_t shared_;
  int row_;
  bool inside_, backwards_;
};

}  // namespace gla_ext::cuda::sm90
