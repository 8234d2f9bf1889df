// Sums the partial results of a kernel's blocks, in an order that depends only on their number.
#pragma once

#include <cstdint>

namespace gla_ext::cuda {

constexpr int kSumColumns = 32, kSumRows = 32;  // threads of a block

// The sum of partials[blocks, width] over blocks; the threads of row 0 get it. Each thread of a
// column adds every kSumRows-th partial result, then these sums are added. All threads must call
// it, with their column.
__device__ __forceinline__ float sum_over_blocks(const float* partials, int64_t blocks,
                                                 int64_t width, int64_t column) {
  __shared__ float s_sums[kSumRows][kSumColumns];
  float sum = 0.f;
  if (column < width)
    for (int64_t block = threadIdx.y; block < blocks; block += kSumRows)
      sum += partials[block * width + column];
  s_sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();  // s_sums is written
  if (threadIdx.y == 0)
    for (int i = 1; i < kSumRows; ++i) sum += s_sums[i][threadIdx.x];
  return sum;
}

}  // namespace gla_ext::cuda
