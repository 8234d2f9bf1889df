#pragma once

#include <ATen/ops/empty.h>

namespace gla_ext {

// What operators return while a graph is traced, of sizes that may be symbolic.
inline at::Tensor empty(c10::SymIntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype) {
  return at::empty_symint(sizes,
                          like.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
}

inline at::Tensor fresh(const at::Tensor& like) {
  return empty(like.sym_sizes(), like, like.scalar_type());
}

}  // namespace gla_ext
