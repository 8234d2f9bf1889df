// What sums.cu makes of the gates of a chunk and head, and the sweeps read.
#pragma once

#include "cuda/host/params.h"

namespace gla_ext::cuda {

// Number (row, slot, head) of `Problem::prepared`, where gates are one a head.
struct alignas(16) HeadGates {
  float b[kChunk][2];        // log2 units, as a sum of two: each has its own rounding
  float from_start[kChunk];  // scale 2^b
  float to_end[kChunk];      // 2^(b_C - b)
  float decay[4];            // 2^b_C, four times
};
static_assert(sizeof(HeadGates) % 16 == 0, "copied by 16 bytes");

}  // namespace gla_ext::cuda
