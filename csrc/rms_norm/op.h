// The inputs of the norm, for every backend and for tracing.
#pragma once

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string_view>
#include <vector>

#include "common/activation.h"
#include "common/shape.h"
#include "dispatch/arguments.h"
#include "dispatch/meta.h"
#include "ops.h"

namespace gla_ext {

// The properties of a call that every backend needs.
struct NormCall {
  Activation activation = Activation::kSwish;
  at::ScalarType accumulate = at::kFloat;  // of rstd and the sums: fp64 for fp64 inputs
};

// The arguments, described in ops.h.
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

// The norm after the residual stream is added. The sum has the residual's dtype: x's, or fp32.
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
};

NormCall check_norm(const NormGateForward& a);
NormCall check_norm(const NormGateBackward& a);
NormCall check_norm(const NormResidualForward& a);
NormCall check_norm(const NormResidualBackward& a);

inline std::vector<at::Tensor> those_given(std::initializer_list<OptionalTensor> tensors) {
  std::vector<at::Tensor> found;
  for (const OptionalTensor& t : tensors)
    if (given(t)) found.push_back(*t);
  return found;
}

// Makes the operators from a backend. Backend::with(op, call, tensors, weight, eps, f) gives f a
// run of its kernels over the rows of the tensors, unless there are no rows. The run has the
// kernels' arguments `p`, and
//   input(i), output(t), rstd(t)  tensor i of these, and others, as `p` has them
//   stream_like(t)                sets the dtype of the stream and its gradients
//   forward(), backward()         the latter gives dweight, in the dtype that it is summed in
template <class Backend>
struct NormsOn {
  static NormForwardOutputs gate_fwd(const NormGateForward& a) {
    const NormCall call = check_norm(a);
    at::Tensor y = fresh(a.x), rstd = empty_rstd(a.x, call);
    Backend::with("rms_norm_gate", call, those_given({a.x, a.gate}), a.weight, a.eps,
                  [&](auto& run) {
                    run.p.x = run.input(0);
                    if (given(a.gate)) run.p.gate = run.input(1);
                    run.p.y = run.output(y);
                    run.p.rstd = run.rstd(rstd);
                    run.forward();
                  });
    return {y, rstd};
  }

  static NormBackwardOutputs gate_bwd(const NormGateBackward& a) {
    const NormCall call = check_norm(a);
    at::Tensor dx = fresh(a.x), dweight;
    at::Tensor dgate = given(a.gate) ? fresh(*a.gate) : nothing(a.x, call);
    at::Tensor y = a.output ? fresh(a.x) : nothing(a.x, call);
    Backend::with("rms_norm_gate_bwd", call, those_given({a.x, a.dy, a.gate}), a.weight, /*eps=*/0,
                  [&](auto& run) {
                    const at::Tensor kept = a.rstd.contiguous();
                    run.p.x = run.input(0);
                    run.p.dy = run.input(1);
                    run.p.dx = run.output(dx);
                    if (given(a.gate)) {
                      run.p.gate = run.input(2);
                      run.p.dgate = run.output(dgate);
                    }
                    if (a.output) run.p.y = run.output(y);
                    run.p.rstd = run.rstd(kept);
                    dweight = run.backward();
                  });
    return {dx, weight_grad(a.weight, dweight, a.x, call), dgate, y};
  }

  static NormResidualForwardOutputs residual_fwd(const NormResidualForward& a) {
    const NormCall call = check_norm(a);
    at::Tensor y = fresh(a.x), stream = fresh(a.residual);
    at::Tensor rstd = empty_rstd(a.x, call);
    Backend::with("rms_norm_residual", call, {a.x, a.residual}, a.weight, a.eps, [&](auto& run) {
      run.stream_like(stream);
      run.p.x = run.input(0);
      run.p.residual = run.input(1);
      run.p.stream = run.output(stream);
      run.p.y = run.output(y);
      run.p.rstd = run.rstd(rstd);
      run.forward();
    });
    return {y, stream, rstd};
  }

  static NormResidualBackwardOutputs residual_bwd(const NormResidualBackward& a) {
    const NormCall call = check_norm(a);
    const bool both = a.dy.scalar_type() == a.stream.scalar_type();
    at::Tensor dresidual = fresh(a.stream), dweight;
    at::Tensor dx = both ? empty({0}, a.dy, a.dy.scalar_type()) : fresh(a.dy);
    Backend::with("rms_norm_residual_bwd", call, those_given({a.dy, a.stream, a.dstream}), a.weight,
                  /*eps=*/0, [&](auto& run) {
                    const at::Tensor kept = a.rstd.contiguous();
                    run.stream_like(a.stream);
                    run.p.dy = run.input(0);
                    run.p.x = run.input(1);
                    if (given(a.dstream)) run.p.dstream = run.input(2);
                    run.p.dresidual = run.output(dresidual);
                    if (!both) run.p.dx = run.output(dx);
                    run.p.rstd = run.rstd(kept);
                    dweight = run.backward();
                  });
    return {dx, dresidual, weight_grad(a.weight, dweight, a.dy, call)};
  }

 private:
  static at::Tensor nothing(const at::Tensor& x, const NormCall& call) {
    return empty({0}, x, call.accumulate);
  }
  static at::Tensor empty_rstd(const at::Tensor& x, const NormCall& call) {
    return empty(x.sym_sizes().slice(0, x.dim() - 1), x, call.accumulate);
  }
  // `found` is undefined if there are no rows.
  static at::Tensor weight_grad(const OptionalTensor& weight, const at::Tensor& found,
                                const at::Tensor& x, const NormCall& call) {
    if (!given(weight)) return nothing(x, call);
    if (found.defined()) return found.to(weight->scalar_type());
    return at::zeros_symint(weight->sym_sizes(), weight->options());
  }
};

template <class Backend>
void register_norms(torch::Library& m) {
  using On = NormsOn<Backend>;
  m.impl("rms_norm_gate_fwd", by_arguments<rms_norm_gate_fwd, On::gate_fwd>);
  m.impl("rms_norm_gate_bwd", by_arguments<rms_norm_gate_bwd, On::gate_bwd>);
  m.impl("rms_norm_residual_fwd", by_arguments<rms_norm_residual_fwd, On::residual_fwd>);
  m.impl("rms_norm_residual_bwd", by_arguments<rms_norm_residual_bwd, On::residual_bwd>);
}

}  // namespace gla_ext
