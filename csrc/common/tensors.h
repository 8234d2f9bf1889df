// Tensors as backends take them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "shape.h"

namespace gla_ext {

// Uninitialised, of the same sizes and options, contiguous whatever the strides of `t`.
inline at::Tensor contiguous_like(const at::Tensor& t) {
  return at::empty(t.sizes(), t.options().memory_format(at::MemoryFormat::Contiguous));
}

inline OptionalTensor contiguous(const OptionalTensor& t) {
  return given(t) ? OptionalTensor(t->contiguous()) : std::nullopt;
}

inline const void* data_of(const OptionalTensor& t) {
  return given(t) ? t->const_data_ptr() : nullptr;
}

}  // namespace gla_ext
