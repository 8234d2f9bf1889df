// What the norm takes, for every backend and for tracing.
#pragma once

#include <string_view>

#include "common/activation.h"
#include "common/shape.h"

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

// With the residual stream added before; the sum is of the residual's dtype, which is x's or fp32.
NormCall check_rms_norm_residual_fwd(const at::Tensor& x, const at::Tensor& residual,
                                     const OptionalTensor& weight);

NormCall check_rms_norm_residual_bwd(const at::Tensor& dy, const OptionalTensor& dstream,
                                     const at::Tensor& stream, const OptionalTensor& weight,
                                     const at::Tensor& rstd);

}  // namespace gla_ext
