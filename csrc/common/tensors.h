// Fresh tensors of backends.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace gla_ext {

// Uninitialised, of the same sizes and options, contiguous whatever the strides of `t`.
inline at::Tensor contiguous_like(const at::Tensor& t) {
  return at::empty(t.sizes(), t.options().memory_format(at::MemoryFormat::Contiguous));
}

}  // namespace gla_ext
