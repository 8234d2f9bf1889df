// How the columns of a linear map of few rows are spread over warps.
#pragma once

#include "params.h"

namespace gla_ext::cuda::decode {

constexpr int kSteps = 4;  // of a warp at once
constexpr int kChunkColumns = kSteps * kDecodeStep;

// Warps of a block: at most, and at least as many as there are tiles of 8 rows of x.
constexpr int most_warps(bool has_norm) { return has_norm ? 8 : 22; }
constexpr int kLeastWarps = 4;
inline int warps_of(int D, bool has_norm) {
  const int chunks = (D + kChunkColumns - 1) / kChunkColumns, most = most_warps(has_norm);
  const int turns = (chunks + most - 1) / most, warps = (chunks + turns - 1) / turns;
  return warps < kLeastWarps ? kLeastWarps : warps;
}

}  // namespace gla_ext::cuda::decode
