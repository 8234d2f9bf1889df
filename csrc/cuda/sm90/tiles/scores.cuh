// A = tril(q^ k^T) of a chunk whose q^ and k^ are in shared memory. A warpgroup makes kColumns of
// the 64 columns, starting at `first`.
#pragma once

#include "tiles.cuh"

namespace gla_ext::cuda::sm90 {

// Issues the products. q, k: [token][K].
template <int K, int kColumns>
__device__ __forceinline__ void begin_scores(float (&A)[kColumns / 2], const Tile* q, const Tile* k,
                                             int first) {
  constexpr auto kSummed = Contiguous::kSummed;
  const Operand rows = *q, columns = Operand(*k).from_row(first);
  begin_products();
#pragma unroll
  for (int i = 0; i < K / 16; ++i)
    product<kSummed, kSummed>(A, sixteen_columns(rows, i), sixteen_columns(columns, i), i > 0);
  commit_products();
}

// Stores A to a tile [token][token], with zeros above the diagonal and in the rows from `end` on,
// which are strong. thread: index in the warpgroup.
template <int kColumns>
__device__ __forceinline__ void place_scores(const Tile& tile, const float (&A)[kColumns / 2],
                                             int end, int first, int thread) {
  const Fragments fragments;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = first + thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int j = 2 * i + x / 2, e = x % 2, below = row + 8 * e - (8 * j + column);
      const bool kept = end == kTile || row + 8 * e < end;
      words[x] = pack(kept && below >= 0 ? A[4 * j + 2 * e] : 0.f,
                      kept && below >= 1 ? A[4 * j + 2 * e + 1] : 0.f);
    }
    fragments.store(tile, first / 16 + i, words);
  }
}

}  // namespace gla_ext::cuda::sm90
