// A pool of states as the recurrent kernels read and write it.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda_kernels.h"

namespace gla_ext::cuda {

void use_pool(Recurrence& p, const at::Tensor& state, bool write);

}  // namespace gla_ext::cuda
