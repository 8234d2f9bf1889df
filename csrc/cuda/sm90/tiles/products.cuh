// Products of tiles by all warpgroups of a block, each with a part of the columns.
#pragma once

#include "channels.cuh"

namespace gla_ext::cuda::sm90 {

// The caller's warpgroup, and its lane's position in the 64 rows of a product.
struct Place {
  int thread, group, row, t;  // t: which column pair of each eight columns
  __device__ __forceinline__ Place()
      : thread(thread_index()),
        // One value per warp, so that the compiler sees that products are not in diverging
        // branches.
        group(__shfl_sync(0xffffffffu, thread / kGroupThreads, 0)),
        row(thread % kGroupThreads / 32 * 16 + thread % 32 / 4),
        t(thread % 4) {}
};

// The increment of a descriptor from 16 summed elements to the next 16.
template <Contiguous kOperand>
constexpr int kNextSixteen = (kOperand == Contiguous::kSummed ? 32 : 16 * kRowBytes) >> 4;

// d = A B over 64 summed elements, or d += A B if `add`. See the names below.
template <Contiguous kA, Contiguous kB, int kN>
__device__ __forceinline__ void multiply(float (&d)[kN], const Operand& A, const Operand& B,
                                         bool add = true) {
  const uint64_t a = descriptor(A), b = descriptor(B);
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i)
    product<kA, kB>(d, a + i * kNextSixteen<kA>, b + i * kNextSixteen<kB>, add || i > 0);
}

// d = A B with 128 columns: those of B's tile and of the next tile.
template <Contiguous kA, Contiguous kB>
__device__ __forceinline__ void multiply(float (&d)[2][32], const Operand& A, const Operand& B) {
  const uint64_t a = descriptor(A.address, 0),
                 b = descriptor(B.address, kB == Contiguous::kSummed ? 0 : kTileBytes);
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i)
    product<kA, kB>(d[0], d[1], a + i * kNextSixteen<kA>, b + i * kNextSixteen<kB>);
}

// d = A B^T and others = A C^T, where C is the tile after B's. The descriptors must be made before
// `begin_products`; otherwise ptxas runs short of registers (C7511).
__device__ __forceinline__ void multiply_two(float (&d)[32], float (&others)[32], uint64_t A,
                                             uint64_t B, bool add = true) {
  constexpr auto kSummed = Contiguous::kSummed;
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i)
    product<kSummed, kSummed>(d, others, A + i * kNextSixteen<kSummed>,
                              B + i * kNextSixteen<kSummed>, add || i > 0);
}

// Issues products named by how the tiles lie in memory: A [m][s] or A^T [s][m], B [s][n] or B^T
// [n][s], over the 64 summed elements s. d += A B, A B^T or A^T B; d = ... if not `add`.
template <class D>
__device__ __forceinline__ void mma_AB(D& d, const Operand& A, const Operand& B, bool add = true) {
  multiply<Contiguous::kSummed, Contiguous::kOther>(d, A, B, add);
}
template <class D>
__device__ __forceinline__ void mma_ABt(D& d, const Operand& A, const Operand& B, bool add = true) {
  multiply<Contiguous::kSummed, Contiguous::kSummed>(d, A, B, add);
}
template <class D>
__device__ __forceinline__ void mma_AtB(D& d, const Operand& A, const Operand& B, bool add = true) {
  multiply<Contiguous::kOther, Contiguous::kOther>(d, A, B, add);
}

template <int kN>
__device__ __forceinline__ void clear(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) d[i] = 0;
}

// Stores a warpgroup's columns of a [64 x 64] bf16 tile.
template <int kN>
__device__ __forceinline__ void store_columns(Tile& tile, const float (&d)[kN],
                                              int group = Place().group) {
  const Place at;
#pragma unroll
  for (int j = 0; j < kN / 4; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      in_tile<uint32_t>(tile, swizzled(at.row + 8 * e, group * (kN / 4) + j) + 4 * at.t) =
          pack(d[4 * j + 2 * e], d[4 * j + 2 * e + 1]);
}

// Stores a warpgroup's columns of scores, zero above the diagonal.
template <int kN>
__device__ __forceinline__ void store_scores(Tile& tile, float (&d)[kN],
                                             int group = Place().group) {
  const Place at;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const int row = at.row + i / 2 % 2 * 8, column = group * 2 * kN + i / 4 * 8 + 2 * at.t;
    d[i] = column + i % 2 <= row ? d[i] : 0.f;
  }
  store_columns(tile, d, group);
}

// Adds x of the lane kHalf rows away. Each of the two lanes keeps the sums of one half of the
// columns.
template <int kHalf>
__device__ __forceinline__ void fold_rows(float (&x)[16]) {
  const bool upper = (static_cast<int>(threadIdx.x) & 4 * kHalf) != 0;
#pragma unroll
  for (int i = 0; i < 2 * kHalf; ++i) {
    const float sent = upper ? x[i] : x[i + 2 * kHalf], kept = upper ? x[i + 2 * kHalf] : x[i];
    x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, 4 * kHalf);
  }
}

}  // namespace gla_ext::cuda::sm90
