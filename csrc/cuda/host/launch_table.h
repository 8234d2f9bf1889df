// From a kernel of the plan to the function that launches it.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "plan/kernels.h"

namespace gla_ext::cuda {

// `p` as the kernel's side sees the call, `values` as its values do (launch.h).
void launch(Kernel kernel, const Problem& p, const Problem& values, cudaStream_t stream);

}  // namespace gla_ext::cuda
