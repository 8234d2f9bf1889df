// Whether this build has sm_90a code for the current device. Compiled for any other architecture,
// the kernels of this folder are empty.
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

__global__ void marker() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ volatile int there;  // its size tells `available` that the code exists
  there = 1;
#endif
}

}  // namespace

bool available() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, marker) == cudaSuccess &&
         attributes.sharedSizeBytes > 0;
}

}  // namespace gla_ext::cuda::sm90
