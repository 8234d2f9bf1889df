// The input contract of the short convolution, once, for every backend and for tracing.
#pragma once

#include "common/shape.h"

namespace gla_ext {

// What every backend needs to know of a call.
struct ConvolutionShape {
  c10::SymInt B, T, D, W;
  c10::SymInt N;  // sequences
  bool packed = false;
  at::ScalarType accumulate = at::kFloat;  // fp64 for fp64 inputs
};

ConvolutionShape check_short_convolution_fwd(const at::Tensor& x, const at::Tensor& weight,
                                             const OptionalTensor& bias,
                                             const OptionalTensor& cache,
                                             const OptionalTensor& cu_seqlens);

ConvolutionShape check_short_convolution_bwd(const at::Tensor& dy, const OptionalTensor& dstate,
                                             const at::Tensor& x, const at::Tensor& weight,
                                             const OptionalTensor& bias,
                                             const OptionalTensor& cache,
                                             const OptionalTensor& cu_seqlens);

// A pool of caches [P, D, W], and what the N sequences do with it, each a row of the batch or a
// packed one; as PoolInputs of the recurrence.
struct ConvolutionPoolInputs {
  const at::Tensor& state;
  const OptionalTensor& slots;              // [N]
  const OptionalTensor& write_slots;        // [N]
  const OptionalTensor& has_initial_state;  // [N], bool
  const OptionalTensor& cu_seqlens;         // [N + 1]
  const at::Tensor* out = nullptr;          // [B, T, D], where y goes
};
ConvolutionShape check_short_convolution_pool(const at::Tensor& x, const at::Tensor& weight,
                                              const OptionalTensor& bias,
                                              const ConvolutionPoolInputs& pool);

// For backends: the caches of a pool are read and written where they lie, so each is contiguous and
// apart from the others; and y where `out` lies, see output.h.
void check_convolution_pool_layouts(const at::Tensor& x, const at::Tensor& weight,
                                    const OptionalTensor& bias, const ConvolutionPoolInputs& pool);

// For backends: [B, T, D] whose channels are contiguous, copied where they are not.
at::Tensor with_contiguous_channels(const at::Tensor& t);

// For backends: the strides of batch rows and tokens, 0 for a dimension of size 1, of which none is
// ever taken.
struct TokenStrides {
  int64_t b = 0, t = 0;
};
TokenStrides token_strides(const at::Tensor& t);

}  // namespace gla_ext
