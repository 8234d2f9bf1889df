// What the forward sweeps that gate leave in memory for backward, where operands are kept: what
// they have on chip anyway.
#pragma once

#include "../operands.cuh"
#include "gating.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// A chunk's operands, K of 65 to 128, when `Gating` is done with it and a barrier behind its fence.
// By one thread; the chunk is still read when this returns.
__device__ __forceinline__ void store_operands(unsigned char* out, const GatedChunk& chunk) {
  const auto store_factors = [&](Factor i, const float* factors) {
    constexpr int kBytes = kOperandKeys * sizeof(float);
    bulk_store(out + offsetof(OperandGroup, factors) + i * kBytes, factors, kBytes);
  };
  bulk_store(out + offsetof(OperandGroup, q), chunk.q, sizeof(OperandGroup::q));
  store_factors(kEnter, chunk.enter);
  store_factors(kMiddle, chunk.middle);
  store_factors(kLeave, chunk.leave);
  store_factors(kSum, chunk.b_last);
  bulk_store(out + offsetof(OperandGroup, k), chunk.k, sizeof(OperandGroup::k));
  bulk_store(out + offsetof(Operands<1>, A), chunk.g, sizeof(Operands<1>::A));
  commit_bulk_stores();
  *reinterpret_cast<int4*>(out + offsetof(Operands<1>, exact)) = make_int4(*chunk.exact, 0, 0, 0);
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
