// Reads indices that have not been checked.
#pragma once

#include <cstdint>

#include "cuda/host/indices.h"

namespace gla_ext::cuda {

__device__ __forceinline__ int64_t index_at(const Indices& x, int64_t i) {
  return x.are_int64 ? static_cast<const int64_t*>(x.data)[i]
                     : static_cast<const int32_t*>(x.data)[i];
}

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

}  // namespace gla_ext::cuda
