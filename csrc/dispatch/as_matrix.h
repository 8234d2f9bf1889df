#pragma once

#include <ATen/core/Tensor.h>

namespace gla_ext {

// [..., D] -> [rows, D]
inline at::Tensor as_matrix(const at::Tensor& t) {
  c10::SymInt rows = 1;
  for (const c10::SymInt& size : t.sym_sizes().slice(0, t.dim() - 1)) rows *= size;
  return t.reshape_symint({rows, t.sym_size(-1)});
}

}  // namespace gla_ext
