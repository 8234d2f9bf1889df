// The gradient of an operator's output if none has been passed.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace gla_ext {

// Zeros [B, T, H, V] of q's B, T, H and v's V.
inline at::Tensor zero_output_grad(const at::Tensor& q, const at::Tensor& v) {
  return at::zeros_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)},
                          v.options());
}

}  // namespace gla_ext
