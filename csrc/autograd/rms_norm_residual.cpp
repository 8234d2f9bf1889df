// rms_norm_residual under autograd: the stream, which is an output, weight and rstd, one number a
// row, are saved for backward; x and residual are not.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "checks/rms_norm_gate.h"
#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class RmsNormResidual : public torch::autograd::Function<RmsNormResidual> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& x,
                               const at::Tensor& residual, const OptionalTensor& weight, double eps,
                               at::Tensor* not_differentiable) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, stream, rstd] = rms_norm_residual_fwd(x, residual, weight, eps);
    ctx->save_for_backward({stream, or_undefined(weight), rstd});
    ctx->saved_data["dtype"] = x.scalar_type();
    ctx->set_materialize_grads(false);
    *not_differentiable = rstd;
    return {y, stream};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor none;
    const at::Tensor &dy = grads[0], &dstream = grads[1];
    if (!dy.defined()) {
      if (!dstream.defined()) return {none, none, none, none, none};
      return {dstream.to(ctx->saved_data["dtype"].toScalarType()), dstream, none, none, none};
    }
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &stream = saved[0], &weight = saved[1], &rstd = saved[2];
    auto [dx, dresidual, dweight] =
        rms_norm_residual_bwd(dy, or_absent(dstream), stream, or_absent(weight), rstd);
    const bool both = dy.scalar_type() == stream.scalar_type();
    return {both ? dresidual : dx, dresidual, weight.defined() ? dweight : none, none, none};
  }
};

class RmsNormResidualBackward : public torch::autograd::Function<RmsNormResidualBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const at::Tensor& dy,
                               const OptionalTensor& dstream, const at::Tensor& stream,
                               const OptionalTensor& weight, const at::Tensor& rstd) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, dresidual, dweight] = rms_norm_residual_bwd(dy, dstream, stream, weight, rstd);
    return {dx, dresidual, dweight};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "rms_norm_residual: double backward is not supported");
  }
};

NormResidualForwardOutputs rms_norm_residual_fwd_autograd(const at::Tensor& x,
                                                          const at::Tensor& residual,
                                                          const OptionalTensor& weight,
                                                          double eps) {
  refuse_unsupported("rms_norm_residual", {{"x", x}, {"residual", residual}}, {weight});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return rms_norm_residual_fwd(x, residual, weight, eps);
  }
  at::Tensor rstd;
  auto outputs = RmsNormResidual::apply(x, residual, weight, eps, &rstd);
  return {outputs[0], outputs[1], rstd};
}

NormResidualBackwardOutputs rms_norm_residual_bwd_autograd(const at::Tensor& dy,
                                                           const OptionalTensor& dstream,
                                                           const at::Tensor& stream,
                                                           const OptionalTensor& weight,
                                                           const at::Tensor& rstd) {
  refuse_unsupported("rms_norm_residual_bwd", {{"dy", dy}, {"stream", stream}, {"rstd", rstd}},
                     {dstream, weight});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return rms_norm_residual_bwd(dy, dstream, stream, weight, rstd);
  }
  auto outputs = RmsNormResidualBackward::apply(dy, dstream, stream, weight, rstd);
  return {outputs[0], outputs[1], outputs[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("rms_norm_residual_fwd", rms_norm_residual_fwd_autograd);
  m.impl("rms_norm_residual_bwd", rms_norm_residual_bwd_autograd);
}

}  // namespace gla_ext
