// The input contract of a decoded token's operators, once, for every backend and for tracing.
#pragma once

#include <array>

#include "common/shape.h"

namespace gla_ext {

// Those of a decoded token, which have no gradient.
constexpr std::array<const char*, 5> kDecodeOperators{
    "norm_linear", "norm_swiglu", "linear_residual", "norm_gate_linear_residual",
    "recurrent_gla_low_rank_step_"};

void check_norm_linear(const at::Tensor& x, const OptionalTensor& norm_weight,
                       at::TensorList weights);
void check_norm_swiglu(const at::Tensor& x, const OptionalTensor& norm_weight,
                       const at::Tensor& gate_weight, const at::Tensor& up_weight);
void check_linear_residual(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& residual);
void check_norm_gate_linear_residual(const at::Tensor& o, const OptionalTensor& norm_weight,
                                     const at::Tensor& gate, const at::Tensor& weight,
                                     const at::Tensor& residual);
// A pool's step of one token a row; Shape::N is P.
Shape check_low_rank_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& h, const at::Tensor& gate_weight,
                          const OptionalTensor& gate_bias, double normalizer,
                          const at::Tensor& state, const OptionalTensor& slots, bool state_v_first);

}  // namespace gla_ext
