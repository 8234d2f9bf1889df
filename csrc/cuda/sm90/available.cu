// What code this build has for the current device. Compiled for any other architecture than sm_90a,
// the kernels of this folder are empty. Compiled for less than 9.0, as 8.0+PTX is, no kernel waits
// for the one before it.
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

// The size of its shared memory tells `has_code` that the code exists.
__global__ void sm90_marker() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ volatile int there;
  there = 1;
#endif
}

__global__ void dependent_launch_marker() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ volatile int there;
  there = 1;
#endif
}

bool has_code(void (*marker)()) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, marker) == cudaSuccess &&
         attributes.sharedSizeBytes > 0;
}

}  // namespace

bool available() { return has_code(sm90_marker); }
bool dependent_launch_available() { return has_code(dependent_launch_marker); }

}  // namespace gla_ext::cuda::sm90
