// The norm of a row, shared by forward and by the backward that recomputes it, so that both get the
// same bits.
#pragma once

#include "cuda/device/activation.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda {

// Eight elements of a row: y = x rstd w f(gate).
template <class T, class N>
__device__ __forceinline__ void normed(const Norm& p, const Eight<N>& x, float rstd,
                                       const float (&w)[8], const Eight<T>* gate, float (&y)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i] * rstd * w[i];
  if (gate == nullptr || p.gate.data == nullptr) return;
  with_activation<T>(p.activation, [&](auto activate) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float f, slope;
      activate((*gate)[i], f, slope);
      y[i] *= f;
    }
  });
}

}  // namespace gla_ext::cuda
