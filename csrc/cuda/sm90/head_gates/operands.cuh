// Shared by the sweeps and the summaries with one gate a head: the copies of rows and of sums of
// gates, and the operands that are added to the state.
#pragma once

#include "cuda/sm90/forward/fused/state.cuh"
#include "cuda/sm90/tiles/channels.cuh"
#include "sums.h"

namespace gla_ext::cuda::sm90::head_gates {

// The order of the chunks: from the first to the last, or from the last to the first.
enum class Time { kForward, kBackward };

// Copies a chunk's rows of K channels, starting at `first`.
template <int kTiles>
__device__ __forceinline__ void copy_operand(const Tile* tiles, const Rows& rows,
                                             const Segment& segment, int chunk, int thread, int K,
                                             int first = 0) {
#pragma unroll 1  // unrolled, the addresses take registers that wide blocks' producers lack
  for (int tile = 0; tile + 1 < kTiles; tile += 2)
    copy_rows<2, kGroupThreads>(tiles + tile, rows, segment, chunk, thread, first + tile * kTile,
                                K);
  if constexpr (kTiles % 2 == 1)
    copy_rows<1, kGroupThreads>(tiles + kTiles - 1, rows, segment, chunk, thread,
                                first + (kTiles - 1) * kTile, K);
}

__device__ __forceinline__ void copy_gates(const HeadGates& to, const Problem& p,
                                           const Segment& segment, int chunk, int thread) {
  constexpr int kParts = sizeof(HeadGates) / 16;
  static_assert(kParts <= kGroupThreads);
  const auto* from = reinterpret_cast<const HeadGates*>(p.prepared) + segment.chunk_head(p, chunk);
  if (thread < kParts)
    copy16(shared_address(&to) + 16 * thread, reinterpret_cast<const uint4*>(from) + thread, true);
}

// Calls f(i, words) for v^T [64 values][16 tokens] of a consumer, tokens from 16 i on, as a
// product's operand: word e has values lane / 4 + 8 (e % 2) of tokens 8 (e / 2) + 2 (lane % 4) and
// the next.
template <class F>
__device__ __forceinline__ void for_transposed(const Tile& v, int lane, int warp, F&& f) {
  const int token = lane % 8 + lane / 16 * 8, part = warp * 2 + lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i) {
    uint32_t words[4];
    ldmatrix_transposed(words, &in_tile<bf16>(v, swizzled(token, part) + i * (16 * kRowBytes)));
    f(i, words);
  }
}

// Elements of two tokens, each times its token's factor, rounded to bf16.
__device__ __forceinline__ uint32_t scaled(uint32_t pair, float2 factors) {
  const float2 x = unpack(pair) * factors;
  return pack(x.x, x.y);
}

// v^T [64 values][64 tokens] of a consumer, each token times its factor, as an operand in
// registers.
class ScaledValues {
 public:
  __device__ __forceinline__ ScaledValues(const Tile& v, const float* factors) {
    const int thread = thread_index() % kGroupThreads, lane = thread % 32;
    for_transposed(v, lane, thread / 32, [&](int i, const uint32_t (&words)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        words_[i][e] = scaled(words[e], pair_at(factors, 16 * i + e / 2 * 8 + 2 * (lane % 4)));
    });
  }
  // d += v^T B over tokens [16 i, 16 i + 16).
  template <Contiguous kB, int kN>
  __device__ __forceinline__ void multiply(float (&d)[kN], int i, uint64_t b) const {
    product<kB>(d, words_[i], b);
  }

 private:
  uint32_t words_[kTile / 16][4];
};

// The tokens' factors for the operand that is added to the state.
template <Time kTime>
__device__ __forceinline__ const float* factors_of_values(const HeadGates& g) {
  return kTime == Time::kForward ? g.to_end : g.from_start;
}

// The i-th chunk of a sweep.
template <Time kTime>
__device__ __forceinline__ int chunk_of(const Segment& segment, int i) {
  return kTime == Time::kForward ? i : segment.chunks - 1 - i;
}

}  // namespace gla_ext::cuda::sm90::head_gates
