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

// What the gradient of the gates is made of, as arrays of floats (dots.cuh): of a part of the key
// channels and the 64 tokens of a chunk the sums over what the state gives them, from dq's sweep in
// `dq_intra`, from dk's in `dk_intra`; after dq's those over the pairs inside the chunk. S . dS
// after the last token lies in `dg_intra`.
constexpr int64_t kDotBytes = kChunk * static_cast<int64_t>(sizeof(float));
constexpr int64_t kLastDotBytes = 4 * static_cast<int64_t>(sizeof(float));  // of a warp each
// Parts of K key channels, which are the values of both sweeps: of 64, an even number of them, but
// one of heads of one tile.
constexpr int64_t dot_parts(int64_t K, int64_t V) {
  return K <= 64 && V <= 64 ? 1 : (K + 127) / 128 * 2;
}
// Parts of the pairs: blocks of dq's sweep.
constexpr int64_t pair_parts(int64_t K) { return (K + 127) / 128; }

}  // namespace gla_ext::cuda
