// What the gate's projection takes, for every backend and for tracing.
#pragma once

#include "common/shape.h"

namespace gla_ext {

void check_gate_projection_fwd(const at::Tensor& h, const at::Tensor& weight,
                               const OptionalTensor& bias, double normalizer);

void check_gate_projection_bwd(const at::Tensor& dg, const at::Tensor& h, const at::Tensor& weight,
                               const OptionalTensor& bias, double normalizer);

}  // namespace gla_ext
