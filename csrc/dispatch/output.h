// The contract of what a caller gives to be written: a pool of states, and an output.
#pragma once

#include <initializer_list>
#include <utility>

#include "checker.h"

namespace gla_ext {

// `out` has the sizes and the dtype of what is returned without it.
void check_out(const Checker& check, const at::Tensor& out, at::ScalarType dtype, const char* dims,
               const Sizes& sizes);

// For backends: results are written where `out` lies, so its last dimension must be contiguous, no
// two elements the same, and no input among them. Absent inputs are null.
using NamedTensor = std::pair<const char*, const at::Tensor*>;
void check_out_layout(const char* op, const at::Tensor& out,
                      std::initializer_list<NamedTensor> inputs);

// For backends: a pool of states is read and written where it lies, so its matrices must be
// contiguous and, where they are written, apart from each other.
void check_pool_layout(const char* op, const at::Tensor& state, bool written,
                       const char* name = "state");

}  // namespace gla_ext
