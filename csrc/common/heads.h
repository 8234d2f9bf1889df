// Gates per head, and heads of k, v and the gates that heads of q share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>

#include <cstdint>

#include "common/shape.h"
#include "ops.h"

namespace gla_ext {

// One gate per head: g [B, T, HK] in place of [B, T, HK, K], the same decay for all key channels.
// Kernels that need a gate per channel read it expanded over the channels; its gradient is the sum
// of theirs.
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

// k, v and the gates may have HK heads, a divisor of H. Then G = H / HK heads of q share each of
// them: head h reads head h / G. The kernels read them in place, and write gradients of H heads.

// [B, T, H, D] -> [B, T, HK, D], and [B, T, H] -> [B, T, HK], as autograd sums over repeats.
inline at::Tensor sum_over_groups(const at::Tensor& dx, int64_t HK) {
  if (dx.dim() == 1 || dx.size(2) == HK) return dx;  // 0 elements: the gradient of an absent gate
  // With an explicit dtype, so that autocast does not choose another.
  return at::sum(dx.unflatten(2, {HK, dx.size(2) / HK}), {3}, /*keepdim=*/false, dx.scalar_type());
}

// dq, dk, dv, dg, dgv and dh0; dq and dh0 have H heads, the others HK.
inline BackwardOutputs with_shared_heads(const BackwardOutputs& of_every_head, int64_t HK) {
  const auto& [dq, dk, dv, dg, dgv, dh0] = of_every_head;
  return {dq,
          sum_over_groups(dk, HK),
          sum_over_groups(dv, HK),
          sum_over_groups(dg, HK),
          sum_over_groups(dgv, HK),
          dh0};
}

}  // namespace gla_ext
