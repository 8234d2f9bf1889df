// For the gradient sweeps: rowsum(S dS~), on the warpgroup that holds dS~.
#pragma once

#include "warps.cuh"

namespace gla_ext::cuda::sm90::gradients {

// rowsum(S dS~) of a chunk for a thread's two channels, `row` and row + 8. It does not use tensor
// cores, which are busy with the products.
class RowSums {
 public:
  // Adds 64 value channels, with dS~ in accumulators.
  __device__ __forceinline__ void add(const Operand& S, const float (&dS)[32]) {
    const Fragments fragments(thread_index());
    uint32_t words[2][4];
    fragments.load(words[0], S, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < 3) fragments.load(words[(i + 1) % 2], S, i + 1);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 pair = unpack(words[i % 2][e]);
        const int at = 8 * i + 2 * e;
        d_[e % 2] = fmaf(pair.x, dS[at], fmaf(pair.y, dS[at + 1], d_[e % 2]));
      }
      asm volatile("" : "+f"(d_[0]), "+f"(d_[1]));  // not later: that would take registers
    }
  }
  // Adds 64 value channels with both in accumulators; dS~ is rounded to bf16.
  __device__ __forceinline__ void add_rounded(const float (&S)[32], const float (&dS)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 pair = unpack(pack(dS[2 * i], dS[2 * i + 1]));
      d_[i % 2] = fmaf(pair.x, S[2 * i], fmaf(pair.y, S[2 * i + 1], d_[i % 2]));
    }
  }
  // The sum of channel `row` (e = 0) or row + 8 (e = 1).
  __device__ __forceinline__ float sum(int e) {
    d_[e] += __shfl_xor_sync(0xffffffffu, d_[e], 1);
    d_[e] += __shfl_xor_sync(0xffffffffu, d_[e], 2);
    return d_[e];
  }

 private:
  float d_[2] = {};
};

}  // namespace gla_ext::cuda::sm90::gradients
