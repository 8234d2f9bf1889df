// Finds the sequence of a token, chunk or segment of a packed batch.
#pragma once

#include "cuda/host/params.h"

namespace gla_ext::cuda {

// The last sequence n with first(n) <= index. It is N after the last sequence.
template <class First>
__device__ __forceinline__ uint32_t find_packed(const ChunkGrid& grid, uint32_t index,
                                                First&& first) {
  uint32_t low = 0, high = static_cast<uint32_t>(grid.N);
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (first(middle) <= index)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace gla_ext::cuda
