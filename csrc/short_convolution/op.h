// The inputs of the short convolution, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include "common/shape.h"
#include "dispatch/arguments.h"
#include "ops.h"

namespace gla_ext {

// The properties of a call that every backend needs.
struct ConvolutionShape {
  c10::SymInt B, T, D, W;
  c10::SymInt N;  // sequences
  bool packed = false;
  at::ScalarType accumulate = at::kFloat;  // fp64 for fp64 inputs
};

// The arguments, described in ops.h.
struct ConvolutionForwardArguments {
  const at::Tensor &x, &weight;
  const OptionalTensor &bias, &cache, &cu_seqlens;
  bool output_state;
};

struct ConvolutionBackwardArguments {
  const at::Tensor& dy;
  const OptionalTensor& dstate;
  const at::Tensor &x, &weight;
  const OptionalTensor &bias, &cache, &cu_seqlens;
};

struct ConvolutionPoolArguments {
  const at::Tensor &x, &weight;
  const OptionalTensor& bias;
  at::Tensor& state;
  const OptionalTensor &slots, &write_slots, &has_initial_state, &cu_seqlens;
  Out out;
};

ConvolutionShape check_short_convolution(const ConvolutionForwardArguments& a);
ConvolutionShape check_short_convolution(const ConvolutionBackwardArguments& a);
ConvolutionShape check_short_convolution(const ConvolutionPoolArguments& a);

// For backends, which read and write the caches of a pool in place: each must be contiguous and
// apart from the others. y is written to `out` in place, see output.h.
void check_convolution_pool_layouts(const ConvolutionPoolArguments& a);

// Registers the operators from a backend's kernels. With `out`, the result of `on_pool` is not
// read.
template <auto forward, auto backward, auto on_pool>
void register_short_convolution(torch::Library& m) {
  m.impl("short_convolution_fwd", by_arguments<short_convolution_fwd, forward>);
  m.impl("short_convolution_bwd", by_arguments<short_convolution_bwd, backward>);
  m.impl("short_convolution_", by_arguments<short_convolution_, on_pool>);
  m.impl("short_convolution_.out", by_arguments<short_convolution_out, on_pool>);
}

// For backends: [B, T, D] whose channels are contiguous; a copy if they are not.
at::Tensor with_contiguous_channels(const at::Tensor& t);

// For backends: the strides of batch rows and tokens. They are 0 for a dimension of size 1, whose
// stride is never used.
struct TokenStrides {
  int64_t b = 0, t = 0;
};
TokenStrides token_strides(const at::Tensor& t);

}  // namespace gla_ext
