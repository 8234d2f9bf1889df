// The inputs of SwiGLU, for every backend and for tracing.
#pragma once

#include "common/shape.h"

namespace gla_ext {

void check_swiglu_fwd(const at::Tensor& gate, const at::Tensor& up);
void check_swiglu_bwd(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up);

}  // namespace gla_ext
