// Checks of tensors that a caller gives to be written: pools of states, and outputs.
#pragma once

#include <initializer_list>

#include "checker.h"

namespace gla_ext {

// Checks that `out` has the sizes and dtype of the result that is returned without it.
void check_out(const Checker& check, const at::Tensor& out, at::ScalarType dtype, const char* dims,
               const Sizes& sizes);

// For backends, which write results directly to `out`: its last dimension must be contiguous, and
// its elements must share no memory with each other or with an input. Absent inputs are null.
void check_out_layout(const char* op, const at::Tensor& out,
                      std::initializer_list<NamedTensor> inputs);

// For backends, which read and write a pool of states in place: its matrices must be contiguous
// and, if they are written, must not overlap.
void check_pool_layout(const char* op, const at::Tensor& state, bool written,
                       const char* name = "state");

}  // namespace gla_ext
