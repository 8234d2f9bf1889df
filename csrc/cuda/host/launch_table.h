// From a kernel of the plan to the function that launches it.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plan/kernels.h"
#include "params.h"

namespace gla_ext::cuda {

// `p` as the kernel's side sees the call, `values` as its values do (launchers.h).
void launch(Kernel kernel, const Problem& p, const Problem& value_side, cudaStream_t stream);

}  // namespace gla_ext::cuda
