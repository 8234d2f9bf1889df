// The GPU that code is compiled for, where a kernel's registers depend on it.
#pragma once

namespace gla_ext::cuda {

// The first number of its compute capability; 0 in code for the host.
#if defined(__CUDA_ARCH__)
constexpr int kMajor = __CUDA_ARCH__ / 100;
#else
constexpr int kMajor = 0;
#endif

}  // namespace gla_ext::cuda
