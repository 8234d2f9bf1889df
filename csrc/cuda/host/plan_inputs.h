// What a plan is made from, as far as a call and its GPU say.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/plan/plan.h"

namespace gla_ext::cuda {

// Sizes, dtypes, the GPU and what GLA_EXT_CUDA_PATH asks for; the rest is left at its defaults.
PlanInputs plan_inputs(c10::Device device, const ChunkGrid& grid, int64_t H, int64_t K, int64_t V,
                       DType dtype, DType gate_dtype);

// Whether kernels of sm_90a run on a GPU: one of compute capability 9.0, where this build holds
// their code. Asked once a device, which is the current one.
bool takes_sm90(c10::Device device);

}  // namespace gla_ext::cuda
