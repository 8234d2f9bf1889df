// Tiles of 64 rows by 64 bf16 columns in shared memory, in the layout that warpgroup products read,
// and the copies that fill them.
#pragma once

#include "cuda/device/tile.cuh"
#include "cuda/sm90/segments/segment.cuh"
#include "ptx.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kGroupThreads = 128;             // threads of a warpgroup
constexpr int kTileBytes = kTile * kTile * 2;  // [64][64] bf16
constexpr int kRowBytes = kTile * 2;

// Byte offset in a tile of 16 bytes: part `part` of the eight that make up a row.
__device__ __forceinline__ int swizzled(int row, int part) {
  return row * kRowBytes + ((part ^ (row & 7)) << 4);
}

// 64 rows of 64 bf16, in shared memory or with the same layout in global memory. Operands with more
// columns are several tiles in sequence. fp32 rows take two tiles (see `RowCopier`). This is not a
// struct: with one, ptxas generates different code for some kernels and serialises products
// (C7511).
using Tile = unsigned char[kTileBytes];

// The T at byte `offset` of a tile. The offset comes from `swizzled`.
template <class T>
__device__ __forceinline__ T& in_tile(Tile& tile, int offset) {
  return *reinterpret_cast<T*>(tile + offset);
}
template <class T>
__device__ __forceinline__ const T& in_tile(const Tile& tile, int offset) {
  return *reinterpret_cast<const T*>(tile + offset);
}

// The start of a product's operand: a tile, or one of its rows or columns.
struct Operand {
  uint32_t address;

  __device__ __forceinline__ Operand(const Tile& tile) : address(shared_address(tile)) {}
  __device__ __forceinline__ explicit Operand(uint32_t at) : address(at) {}
  __device__ __forceinline__ Operand from_row(int row) const {
    return Operand(address + row * kRowBytes);
  }
  __device__ __forceinline__ Operand from_column(int column) const {
    return Operand(address + column * 2);
  }
  __device__ __forceinline__ Operand from_tile(int tile) const {
    return Operand(address + tile * kTileBytes);
  }
};

__device__ __forceinline__ uint64_t descriptor(const Operand& x) {
  return descriptor(x.address, 0);
}

// Descriptors of the 16 summed elements that one `product` takes: rows [16 i, 16 i + 16) of an
// operand, or columns [16 i, 16 i + 16), which may lie in the tiles after it.
__device__ __forceinline__ uint64_t sixteen_rows(const Operand& x, int i, int next = kTileBytes) {
  return descriptor(x.address + i * 16 * kRowBytes, next);
}
__device__ __forceinline__ uint64_t sixteen_columns(const Operand& x, int i) {
  return descriptor(x.address + i / 4 * kTileBytes + i % 4 * 32, 0);
}

__device__ __forceinline__ uint32_t pack(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Loads and stores of [16 x 16] elements of a tile by each warp of a warpgroup, in the layout of
// accumulators: word 2 j + e of 16 columns holds rows from 8 e and columns from 8 j on.
class Fragments {
 public:
  __device__ __forceinline__ Fragments() : Fragments(static_cast<int>(threadIdx.x)) {}
  __device__ __forceinline__ explicit Fragments(int thread)
      : offset_(swizzled(thread % kGroupThreads / 32 * 16 + thread % 16, thread % 32 / 16)) {}
  // Accesses columns [16 i, 16 i + 16) of a tile.
  __device__ __forceinline__ void load(uint32_t (&words)[4], const Operand& tile, int i) const {
    ldmatrix(words, tile.address + (offset_ ^ i << 5));
  }
  __device__ __forceinline__ void store(const Operand& tile, int i,
                                        const uint32_t (&words)[4]) const {
    store_matrices(tile.address + (offset_ ^ i << 5), words[0], words[1], words[2], words[3]);
  }

 private:
  uint32_t offset_;
};

// Stores 64 columns of a warpgroup's accumulators as a bf16 tile.
__device__ __forceinline__ void store_tile(const Fragments& fragments, const Tile& tile,
                                           const float* d) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) words[e] = pack(d[8 * i + 2 * e], d[8 * i + 2 * e + 1]);
    fragments.store(tile, i, words);
  }
}

// Copies columns [first, first + 64 kTiles) of the chunks of a segment into tiles. Rows and columns
// that do not exist become zero. kThreads threads share the work; `thread` is the caller's index
// among them. fp32 rows take two tiles, because 8 fp32 columns are 32 bytes. Columns 0 to 3 go to
// the first tile, where 8 bf16 columns would lie; columns 4 to 7 go to the same place of the second
// tile.
template <int kTiles, int kThreads, class T = bf16>
class RowCopier {
 public:
  __device__ __forceinline__ RowCopier(const Rows& r, int32_t stride_t, const Segment& segment,
                                       int chunk, int thread, int first, int columns)
      : stride_(stride_t), row_(thread / kVecs) {
    const int part = thread % kVecs;
    inside_ = first + kEach * part < columns;
    p_ = rows_at<const T>(r, segment.row, segment.token_of(chunk), segment.head) + stride_ * row_ +
         first + kEach * part;
    if constexpr (kEach == 8)
      shared_ = part / 8 * kTileBytes + swizzled(row_, part % 8);
    else
      shared_ = part % 2 * kTileBytes + swizzled(row_, part / 2);
  }

  // Issues the copies of the chunk's `length` rows. Addresses beyond them are never read.
  __device__ __forceinline__ void copy(const Tile* tiles, int length) const {
    const uint32_t shared = shared_address(tiles) + shared_;
    const int rows = inside_ ? length : 0;
    const T* p = p_;
#pragma unroll
    for (int i = 0; i < kTile / kRowsEach; ++i) {
      copy16(shared + i * kRowsEach * kRowBytes, p, row_ + i * kRowsEach < rows);
      p += stride_ * kRowsEach;
    }
  }
  __device__ __forceinline__ void move(int chunks) {
    p_ += static_cast<int64_t>(stride_) * (chunks * kTile);
  }

 private:
  static constexpr int kEach = 16 / sizeof(T);  // columns
  static constexpr int kVecs = kTiles * kTile / kEach, kRowsEach = kThreads / kVecs;
  static_assert(kEach == 8 || kTiles == 1);
  static_assert(kTile % kRowsEach == 0, "every thread copies as many parts");
  static_assert(kRowsEach % 8 == 0, "rows of a thread are swizzled alike");
  const T* p_;
  int32_t stride_;
  uint32_t shared_;
  int row_;
  bool inside_;
};

// Copies one chunk's rows.
template <int kTiles, int kThreads, class T = bf16>
__device__ __forceinline__ void copy_rows(const Tile* tiles, const Rows& r, const Segment& segment,
                                          int chunk, int thread, int first, int columns) {
  int32_t stride = token_offset(r, 1);
  asm volatile("" : "+r"(stride), "+r"(thread));  // takes no registers between chunks
  RowCopier<kTiles, kThreads, T>(r, stride, segment, chunk, thread, first, columns)
      .copy(tiles, segment.length_of(chunk));
}

}  // namespace gla_ext::cuda::sm90
