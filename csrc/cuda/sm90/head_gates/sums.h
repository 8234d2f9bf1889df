// The sums of gates of a chunk and head, which sums.cu makes and the sweeps read.
#pragma once

#include "cuda/host/params.h"

namespace gla_ext::cuda {

// Element (row, entry, head) of `Problem::prepared` when there is one gate a head.
struct alignas(16) HeadGates {
  float b[kChunk][2];        // log2 units, as a sum of two floats
  float from_start[kChunk];  // scale 2^b
  float to_end[kChunk];      // 2^(b_C - b)
  float decay[4];            // 2^b_C, four times
};
static_assert(sizeof(HeadGates) % 16 == 0, "copied by 16 bytes");

// The terms of the gates' gradient, as arrays of floats (dots.cuh). For a part of the key channels
// and the 64 tokens of a chunk: the sums of the state's contributions to the tokens, in `dq_intra`
// from dq's sweep and in `dk_intra` from dk's sweep. After those of dq's sweep come the sums over
// the pairs inside the chunk. S . dS after the last token is in `dg_intra`.
constexpr int64_t kDotBytes = kChunk * static_cast<int64_t>(sizeof(float));
constexpr int64_t kLastDotBytes = 4 * static_cast<int64_t>(sizeof(float));  // one float per warp
// The number of parts of K key channels, which are the values of both sweeps. A part has 64
// channels, and the number is even, except for heads of one tile, which have one part.
constexpr int64_t dot_parts(int64_t K, int64_t V) {
  return K <= 64 && V <= 64 ? 1 : (K + 127) / 128 * 2;
}
// The number of parts of the pairs: one per block of dq's sweep.
constexpr int64_t pair_parts(int64_t K) { return (K + 127) / 128; }

}  // namespace gla_ext::cuda
