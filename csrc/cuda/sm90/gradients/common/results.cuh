// For the gradient sweeps: gradients from a chunk's accumulators, and zeros for the tail.
#pragma once

#include "cuda/sm90/segments/segment.cuh"
#include "warps.cuh"

namespace gla_ext::cuda::sm90::gradients {

// Writes zeros to the gradients of a segment of tokens after the last packed sequence. Called by a
// whole block.
template <class T, int kThreads>
__device__ __forceinline__ void clear_rows(const Rows& r, const Segment& segment, int columns) {
  const int parts = columns / 8;
  const int64_t most = int64_t{segment.chunks} * kChunk;
  const int64_t tokens = segment.length < most ? segment.length : most;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < tokens * parts; i += kThreads)
    store8(rows_at<T>(r, segment.row, segment.start + i / parts, segment.head) + i % parts * 8,
           Eight<T>{});
}
template <class Gate, int kThreads>
__device__ __forceinline__ void clear_gradients(const Problem& p, const Segment& segment) {
  clear_rows<bf16, kThreads>(p.dq, segment, p.K);
  clear_rows<bf16, kThreads>(p.dk, segment, p.K);
  clear_rows<Gate, kThreads>(p.dg, segment, p.K);
  clear_rows<bf16, kThreads>(p.dv, segment, p.V);
}

// The place of a chunk's gradients before they are written as rows.
struct GradientTiles {
  Tile &dq, &dk;
  Tile &high, &low;  // their sum is what dg sums over tokens
};

// Turns x and y of a chunk into dq and dk, and into the terms of dg, q^ x - k^ y. A warp reads and
// writes only its own rows of all tiles; the results may overwrite q^ and k^.
__device__ __forceinline__ void finish(const GradientTiles& to, const float (&x)[32],
                                       const float (&y)[32], const float (&exponents)[32],
                                       const Tile& q, const Tile& k, float scale) {
  const Fragments fragments(thread_index());
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t q_words[4], k_words[4], high[4], low[4];
    fragments.load(q_words, q, i);
    fragments.load(k_words, k, i);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = 8 * i + 2 * e;
      const float2 dq = make_float2(x[at], x[at + 1]), dk = make_float2(y[at], y[at + 1]);
      const float2 term = unpack(q_words[e]) * dq - unpack(k_words[e]) * dk;
      high[e] = pack(term.x, term.y);
      const float2 rest = term - unpack(high[e]);
      low[e] = pack(rest.x, rest.y);
      const float first = exponents[at], second = exponents[at + 1];
      q_words[e] = pack(dq.x * (scale * exp2_ftz(first)), dq.y * (scale * exp2_ftz(second)));
      k_words[e] = pack(dk.x * exp2_ftz(-first), dk.y * exp2_ftz(-second));
    }
    fragments.store(to.dq, i, q_words);
    fragments.store(to.dk, i, k_words);
    fragments.store(to.high, i, high);
    fragments.store(to.low, i, low);
  }
}

// Strong chunks: turns x or y into dq or dk, which replaces the exponents in `terms`.
__device__ __forceinline__ void finish_strong(const float (&d)[32], const FloatTile& terms,
                                              float scale) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    float2& term = terms.at(lane.row + i / 2 % 2 * 8, i / 4 * 8 + 2 * lane.t);
    term = make_float2(d[i] * scale * exp2_ftz(term.x), d[i + 1] * scale * exp2_ftz(term.y));
  }
}

}  // namespace gla_ext::cuda::sm90::gradients
