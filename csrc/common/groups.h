// k, v and the gates may have HK heads, a divisor of H. Then G = H / HK heads of q share each of
// them: head h reads head h / G. The kernels read them in place, and write gradients of H heads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>

#include <cstdint>

#include "ops.h"

namespace gla_ext {

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
