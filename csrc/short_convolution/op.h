// What the short convolution takes, for every backend and for tracing.
#pragma once

#include <torch/library.h>

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

// On a pool the dispatcher calls an operator by its arguments one by one. A backend gives `run`,
// which takes these by name, and registers the operators by it.
// `run` gives y [B, T, D], which nothing reads where there is `out`.
using RunConvolution = at::Tensor (*)(const at::Tensor& x, const at::Tensor& weight,
                                      const OptionalTensor& bias,
                                      const ConvolutionPoolInputs& pool);

template <RunConvolution run>
struct ConvolutionOnPool {
  static at::Tensor step(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                         at::Tensor& state, const OptionalTensor& slots,
                         const OptionalTensor& write_slots, const OptionalTensor& has_initial_state,
                         const OptionalTensor& cu_seqlens) {
    return run(x, weight, bias, {state, slots, write_slots, has_initial_state, cu_seqlens});
  }

  static void step_out(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                       at::Tensor& state, const OptionalTensor& slots,
                       const OptionalTensor& write_slots, const OptionalTensor& has_initial_state,
                       const OptionalTensor& cu_seqlens, at::Tensor& out) {
    run(x, weight, bias, {state, slots, write_slots, has_initial_state, cu_seqlens, &out});
  }

  static void register_in(torch::Library& m) {
    m.impl("short_convolution_", step);
    m.impl("short_convolution_.out", step_out);
  }
};

// For backends: [B, T, D] whose channels are contiguous, copied where they are not.
at::Tensor with_contiguous_channels(const at::Tensor& t);

// For backends: the strides of batch rows and tokens, 0 for a dimension of size 1, of which none is
// ever taken.
struct TokenStrides {
  int64_t b = 0, t = 0;
};
TokenStrides token_strides(const at::Tensor& t);

}  // namespace gla_ext
