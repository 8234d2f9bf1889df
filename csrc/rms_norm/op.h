// What the norm takes, for every backend and for tracing.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string_view>

#include "common/activation.h"
#include "common/shape.h"
#include "dispatch/arguments.h"
#include "ops.h"

namespace gla_ext {

// What every backend needs to know of a call.
struct NormCall {
  Activation activation = Activation::kSwish;
  at::ScalarType accumulate = at::kFloat;  // of rstd and the sums: fp64 for fp64 inputs
};

// The arguments, as ops.h describes them.
struct NormGateForward {
  const at::Tensor& x;
  const OptionalTensor &weight, &gate;
  std::string_view activation;
  double eps;
};

struct NormGateBackward {
  const at::Tensor &dy, &x;
  const OptionalTensor &weight, &gate;
  const at::Tensor& rstd;
  std::string_view activation;
  bool output;
};

// With the residual stream added before; the sum is of the residual's dtype, which is x's or fp32.
struct NormResidualForward {
  const at::Tensor &x, &residual;
  const OptionalTensor& weight;
  double eps;
};

struct NormResidualBackward {
  const at::Tensor& dy;
  const OptionalTensor& dstream;
  const at::Tensor& stream;
  const OptionalTensor& weight;
  const at::Tensor& rstd;

  // Whether dx and dresidual are one tensor.
  bool both() const { return dy.scalar_type() == stream.scalar_type(); }
};

NormCall check_norm(const NormGateForward& a);
NormCall check_norm(const NormGateBackward& a);
NormCall check_norm(const NormResidualForward& a);
NormCall check_norm(const NormResidualBackward& a);

// For backends: the tensors that are there; an empty rstd; and the gradient of the weight of no
// rows, or `none` without one.
inline std::vector<at::Tensor> those_given(std::initializer_list<OptionalTensor> tensors) {
  std::vector<at::Tensor> found;
  for (const OptionalTensor& t : tensors)
    if (given(t)) found.push_back(*t);
  return found;
}
inline at::Tensor empty_rstd(const at::Tensor& x, const NormCall& call) {
  return at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(call.accumulate));
}
inline at::Tensor no_weight_grad(const OptionalTensor& weight, const at::Tensor& none) {
  return given(weight) ? at::zeros(weight->sizes(), weight->options()) : none;
}

// Registers the operators from a backend's kernels.
template <auto gate_fwd, auto gate_bwd, auto residual_fwd, auto residual_bwd>
void register_norms(torch::Library& m) {
  m.impl("rms_norm_gate_fwd", by_arguments<rms_norm_gate_fwd, gate_fwd>);
  m.impl("rms_norm_gate_bwd", by_arguments<rms_norm_gate_bwd, gate_bwd>);
  m.impl("rms_norm_residual_fwd", by_arguments<rms_norm_residual_fwd, residual_fwd>);
  m.impl("rms_norm_residual_bwd", by_arguments<rms_norm_residual_bwd, residual_bwd>);
}

}  // namespace gla_ext
