// The input contract of the norm, once, for every backend and for tracing.
#pragma once

#include <string_view>

#include "common/norm.h"
#include "shape.h"

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

}  // namespace gla_ext
