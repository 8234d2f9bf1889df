// For the gradient sweeps: rowsum(S dS~), by the warpgroup that holds dS~.
#pragma once

#include "warps.cuh"

namespace gla_ext::cuda::sm90::gradients {

// rowsum(S dS~) of a chunk for a thread's channels, `row` and the eighth after it. Not by tensor
// cores, which the products keep busy.
class RowSums {
 public:
  // Adds 64 values, with dS~ in accumulators.
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
      asm volatile("" : "+f"(d_[0]), "+f"(d_[1]));  // not later, which would take registers
    }
  }
  // The same with both in accumulators, dS~ as bf16 has it.
  __device__ __forceinline__ void add_rounded(const float (&S)[32], const float (&dS)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 pair = unpack(pack(dS[2 * i], dS[2 * i + 1]));
      d_[i % 2] = fmaf(pair.x, S[2 * i], fmaf(pair.y, S[2 * i + 1], d_[i % 2]));
    }
  }
  // The sum of channel `row`, or of the eighth after it.
  __device__ __forceinline__ float sum(int e) {
    d_[e] += __shfl_xor_sync(0xffffffffu, d_[e], 1);
    d_[e] += __shfl_xor_sync(0xffffffffu, d_[e], 2);
    return d_[e];
  }

 private:
  float d_[2] = {};
};

}  // namespace gla_ext::cuda::sm90::gradients
