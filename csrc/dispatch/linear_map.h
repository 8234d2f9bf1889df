// Linear maps of rows: checks of their weights, and of the norm before them.
#pragma once

#include "checker.h"

namespace gla_ext {

// [..., D] -> [rows, D]
at::Tensor as_matrix(const at::Tensor& t);

// Checks that the first tensor has at least `rank` dimensions.
void check_first(const char* op, const Checker& check, const char* name, const at::Tensor& t,
                 int64_t rank, const char* dims);

// Checks a weight [N, D] of the first tensor's device and dtype. Returns N.
c10::SymInt check_map(const Checker& check, const char* name, const at::Tensor& weight,
                      const c10::SymInt& D);

void check_norm_weight(const Checker& check, const OptionalTensor& weight, const c10::SymInt& size,
                       const char* dims);

// Checks a linear map of the norm of heads [..., H, V] with a gate [..., H * V]. Returns the
// result's shape.
Sizes check_norm_gate_map(const char* op, const at::Tensor& o, const OptionalTensor& norm_weight,
                          const at::Tensor& gate, const at::Tensor& weight);

}  // namespace gla_ext
