// The inputs of a plan, as far as a call and its GPU determine them.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/plan/plan.h"

namespace gla_ext::cuda {

// Sets sizes, dtypes, the GPU and the choice of GLA_EXT_CUDA_PATH; the rest keeps its defaults.
PlanInputs plan_inputs(c10::Device device, const ChunkGrid& grid, int64_t H, int64_t K, int64_t V,
                       DType dtype, DType gate_dtype);

// Whether kernels of sm_90a run on a GPU: it has compute capability 9.0 and this build holds their
// code. `device` must be the current one; the answer is kept.
bool takes_sm90(c10::Device device);

// Whether kernels may be launched before the one before them is done: this build's code for the GPU
// is of 9.0 or newer, and so waits for it. As `takes_sm90`.
bool takes_dependent_launch(c10::Device device);

}  // namespace gla_ext::cuda
