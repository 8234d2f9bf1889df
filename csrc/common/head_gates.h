// One gate per head: g [B, T, HK] in place of [B, T, HK, K], the same decay for all key channels.
// Kernels that need a gate per channel read it expanded over the channels; its gradient is the sum
// of theirs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>

#include <cstdint>

#include "common/shape.h"

namespace gla_ext {

inline bool is_head_gate(const at::Tensor& g) { return g.dim() == 3; }
inline bool is_head_gate(const OptionalTensor& g) { return given(g) && is_head_gate(*g); }

// A gate as [B, T, HK, K], without a copy.
inline at::Tensor over_channels(const at::Tensor& g, int64_t K) {
  return is_head_gate(g) ? g.unsqueeze(-1).expand({-1, -1, -1, K}) : g;
}
inline OptionalTensor over_channels(const OptionalTensor& g, int64_t K) {
  return given(g) ? OptionalTensor(over_channels(*g, K)) : g;
}

// The dtype in which a gate's gradient is summed before it is rounded to the gate's dtype: kernels
// write the gradient of a head's gate by channels.
inline at::ScalarType gate_grad_dtype(const OptionalTensor& g, at::ScalarType accumulate) {
  return is_head_gate(g) ? accumulate : g->scalar_type();
}

// dg of kernels, [B, T, HK, K] in gate_grad_dtype, as the gradient of g.
inline at::Tensor sum_over_channels(const at::Tensor& dg, const OptionalTensor& g) {
  if (!is_head_gate(g)) return dg;
  // With an explicit dtype, so that autocast does not choose another.
  return at::sum(dg, {3}, /*keepdim=*/false, dg.scalar_type()).to(g->scalar_type());
}

}  // namespace gla_ext
