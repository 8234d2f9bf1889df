// The contract of an output that a caller gives, for operators on a pool.
#pragma once

#include <initializer_list>

#include "checker.h"

namespace gla_ext {

// `out` has the sizes and the dtype of what is returned without it.
void check_out(const Checker& check, const at::Tensor& out, at::ScalarType dtype, const char* dims,
               const Sizes& sizes);

// For backends: results are written where `out` lies, so its last dimension must be contiguous, no
// two elements the same, and no input among them. Absent inputs are null.
void check_out_layout(const char* op, const at::Tensor& out,
                      std::initializer_list<NamedTensor> inputs);

}  // namespace gla_ext
