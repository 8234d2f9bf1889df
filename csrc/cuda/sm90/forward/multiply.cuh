// A chunk as the consumers of the forward sweeps multiply it: o^T of a warpgroup's values, and what
// the state becomes but for the factors by which it leaves.
#pragma once

#include "state.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

struct MultipliedChunk {
  const unsigned char *q, *k, *A;  // q^, k^ [token][K], A [token][token]
  const unsigned char* v;          // [token][64 values]
  const float *enter, *middle;
  bool exact;
};

template <int K>
__device__ __forceinline__ void multiply_chunk(float (&o)[32], State<K>& state,
                                               const MultipliedChunk& chunk) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  const uint32_t q = shared_address(chunk.q), k = shared_address(chunk.k),
                 v = shared_address(chunk.v), A = shared_address(chunk.A);
  state.scale(chunk.enter);
  uint32_t S_operand[K / 16][4];
#pragma unroll
  for (int i = 0; i < K / 16; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      S_operand[i][e] = pack(state.x[8 * i + 2 * e], state.x[8 * i + 2 * e + 1]);
  if (chunk.exact) state.scale(chunk.middle);
  begin_products();
#pragma unroll
  for (int i = 0; i < K / 16; ++i)
    product(o, S_operand[i], descriptor(q + i / 4 * kTileBytes + i % 4 * kStepBytes, 0), i > 0);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    product<kOther, kSummed>(o, descriptor(v + 2048 * i, kTileBytes),
                             descriptor(A + kStepBytes * i, 0));
  commit_products();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    product<kOther, kOther>(state.x, descriptor(v + 2048 * i, kTileBytes),
                            descriptor(k + 2048 * i, kTileBytes));
  commit_products();
  wait_for_products<0>();
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
