// The input contract of the norm, once, for every backend and for tracing; and its tensors as rows.
#pragma once

#include <string_view>
#include <vector>

#include "checks.h"
#include "norm.h"

namespace gla_ext {

// What every backend needs to know of a call.
struct NormCall {
  Activation activation = Activation::kSwish;
  at::ScalarType accumulate = at::kFloat;  // of rstd and the sums: fp64 for fp64 inputs
};

NormCall check_rms_norm_gate_fwd(const at::Tensor& x, const OptionalTensor& weight,
                                 const OptionalTensor& gate, std::string_view activation);

NormCall check_rms_norm_gate_bwd(const at::Tensor& dy, const at::Tensor& x,
                                 const OptionalTensor& weight, const OptionalTensor& gate,
                                 const at::Tensor& rstd, std::string_view activation);

// Tensors of one shape [..., V] as rows of V contiguous elements, for backends. Those that two
// strides do not describe are copied.
struct RowLayout {
  int64_t rows = 0, inner_rows = 1, width = 1;
  std::vector<at::Tensor> tensors;
  std::vector<RowStrides> strides;
};
RowLayout lay_out_rows(std::vector<at::Tensor> tensors);

}  // namespace gla_ext
