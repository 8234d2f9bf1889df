// Whether kernels of sm_90a run on a GPU.
#pragma once

#include <c10/core/Device.h>

namespace gla_ext::cuda {

// On one of compute capability 9.0 where this build holds their code. Asked once a device, which is
// the current one.
bool takes_sm90(c10::Device device);

}  // namespace gla_ext::cuda
