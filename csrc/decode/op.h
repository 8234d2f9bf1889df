// A decoded token's linear maps: what they take, and the same as compositions of other operators,
// which serve on CPU, and on CUDA where their kernels do not. docs/operators.md says what each
// computes.
#pragma once

#include "common/shape.h"

namespace gla_ext {

void check_norm_linear(const at::Tensor& x, const OptionalTensor& norm_weight,
                       at::TensorList weights);
void check_norm_swiglu(const at::Tensor& x, const OptionalTensor& norm_weight,
                       const at::Tensor& gate_weight, const at::Tensor& up_weight);
void check_linear_residual(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& residual);
void check_norm_gate_linear_residual(const at::Tensor& o, const OptionalTensor& norm_weight,
                                     const at::Tensor& gate, const at::Tensor& weight,
                                     const at::Tensor& residual);

namespace composed {

std::vector<at::Tensor> norm_linear(const at::Tensor& x, const OptionalTensor& norm_weight,
                                    double eps, at::TensorList weights, bool overlaps);
at::Tensor norm_swiglu(const at::Tensor& x, const OptionalTensor& norm_weight, double eps,
                       const at::Tensor& gate_weight, const at::Tensor& up_weight, bool overlaps);
at::Tensor linear_residual(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& residual, bool overlaps);
at::Tensor norm_gate_linear_residual(const at::Tensor& o, const OptionalTensor& norm_weight,
                                     double eps, const at::Tensor& gate, const at::Tensor& weight,
                                     const at::Tensor& residual, bool overlaps);

}  // namespace composed
}  // namespace gla_ext
