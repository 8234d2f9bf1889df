// A decoded token's operators as compositions of others: on CPU, and on CUDA where their kernels do
// not serve. ops.cpp has the schemas; docs/operators.md says what each computes.
#pragma once

#include "common/shape.h"
#include "ops.h"

namespace gla_ext::composed {

std::vector<at::Tensor> norm_linear(const at::Tensor& x, const OptionalTensor& norm_weight,
                                    double eps, at::TensorList weights, bool overlaps);
at::Tensor norm_swiglu(const at::Tensor& x, const OptionalTensor& norm_weight, double eps,
                       const at::Tensor& gate_weight, const at::Tensor& up_weight, bool overlaps);
at::Tensor linear_residual(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& residual, bool overlaps);
at::Tensor norm_gate_linear_residual(const at::Tensor& o, const OptionalTensor& norm_weight,
                                     double eps, const at::Tensor& gate, const at::Tensor& weight,
                                     const at::Tensor& residual, bool overlaps);
at::Tensor recurrent_gla_low_rank_step_(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const at::Tensor& h,
                                        const at::Tensor& gate_weight,
                                        const OptionalTensor& gate_bias, double normalizer,
                                        std::optional<double> clamp_min, at::Tensor& state,
                                        const OptionalTensor& slots, std::optional<double> scale,
                                        bool state_v_first, bool overlaps);

}  // namespace gla_ext::composed
