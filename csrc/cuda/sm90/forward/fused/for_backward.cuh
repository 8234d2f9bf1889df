// Stores prepared chunks for backward, from the forward sweeps that gate and have them on chip
// anyway.
#pragma once

#include "cuda/sm90/prepare/prepared.cuh"
#include "cuda/sm90/tiles/gating.cuh"

namespace gla_ext::cuda::sm90::forward {

// Stores a prepared chunk, K of 65 to 128. Called by one thread, after `Gating`, its fence and a
// barrier. When it returns, the stores still read the chunk.
__device__ __forceinline__ void store_operands(unsigned char* out, const GatedChunk& chunk) {
  const auto store_factors = [&](Factor i, const float* factors) {
    constexpr int kBytes = kGroupKeys * sizeof(float);
    bulk_store(out + offsetof(KeyGroup, factors) + i * kBytes, factors, kBytes);
  };
  bulk_store(out + offsetof(KeyGroup, q), chunk.q, sizeof(KeyGroup::q));
  store_factors(kEnter, chunk.enter);
  store_factors(kMiddle, chunk.middle);
  store_factors(kLeave, chunk.leave);
  store_factors(kSum, chunk.b_last);
  bulk_store(out + offsetof(KeyGroup, k), chunk.k, sizeof(KeyGroup::k));
  bulk_store(out + offsetof(PreparedChunk<1>, A), chunk.g, sizeof(PreparedChunk<1>::A));
  commit_bulk_stores();
  *reinterpret_cast<int4*>(out + offsetof(PreparedChunk<1>, strong)) =
      make_int4(*chunk.strong, 0, 0, 0);
}

}  // namespace gla_ext::cuda::sm90::forward
