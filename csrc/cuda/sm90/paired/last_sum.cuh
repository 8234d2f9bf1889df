// b_C of a channel, for references that gradient_sweep.cu comes to as well: it sums the gates
// again, and another order of the sums may round to the neighbouring reference.
#pragma once

#include "../forward/gating.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// As the products sum it, but where the order could decide as pairs.cuh does: 16 tokens at a time,
// one by one.
struct SweptSum {
  __device__ __forceinline__ float operator()(const GatedChunk& chunk, int channel) const {
    const float b_last = chunk.b_last[channel];
    // More than sums of 64 gates in tier 1's range differ by: log2 units.
    constexpr float kDoubt = 1.f / 1024;
    const float half = 0.5f * b_last;
    const bool near_tie = fabsf(half - rintf(half)) >= 0.5f * (1.f - kDoubt);
    const bool near_range = fabsf(fabsf(b_last) - kTierRange) <= kDoubt;
    return near_tie || near_range ? sum(chunk.g, channel) : b_last;
  }

 private:
  __device__ __forceinline__ static float sum(const unsigned char* gates, int channel) {
    const unsigned char* column = gates + channel / kTile * kTileBytes + channel % 8 * 2;
    const int part = channel % kTile / 8;
    float total = 0;
#pragma unroll 1
    for (int first = 0; first < kTile; first += static_cast<int>(kSubChunk)) {
      float sum = 0;
#pragma unroll 4
      for (int i = 0; i < kSubChunk; ++i)
        sum +=
            to_log2(to_float(*reinterpret_cast<const bf16*>(column + swizzled(first + i, part))));
      total += sum;
    }
    return total;
  }
};

}  // namespace
}  // namespace gla_ext::cuda::sm90
