// What enters a rank's part of the sequences, on CUDA: how the host calls the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "fold.h"

namespace gla_ext::cuda {

void fold_ranks(const Fold<float>& p, cudaStream_t stream);

}  // namespace gla_ext::cuda
