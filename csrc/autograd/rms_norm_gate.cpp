// rms_norm_gate under autograd: forward and backward are the registered operators; x, weight, gate
// and rstd, one number a row, are saved for backward.
#include "checks/rms_norm_gate.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class RmsNormGate : public torch::autograd::Function<RmsNormGate> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& gate,
                               std::string_view activation, double eps,
                               at::Tensor* not_differentiable) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, rstd] = rms_norm_gate_fwd(x, weight, gate, activation, eps);
    ctx->save_for_backward({x, or_undefined(weight), or_undefined(gate), rstd});
    ctx->saved_data["activation"] = std::string(activation);
    ctx->set_materialize_grads(false);
    // Around the Function: compiled autograd refuses outputs that are marked as
    // non-differentiable.
    *not_differentiable = rstd;
    return {y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor none;
    if (!grads[0].defined()) return {none, none, none, none, none, none};
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &gate = saved[2], &rstd = saved[3];
    auto [dx, dweight, dgate] =
        rms_norm_gate_bwd(grads[0], x, or_absent(weight), or_absent(gate), rstd,
                          ctx->saved_data["activation"].toStringView());
    return {dx, weight.defined() ? dweight : none, gate.defined() ? dgate : none, none, none, none};
  }
};

class RmsNormGateBackward : public torch::autograd::Function<RmsNormGateBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& gate,
                               const at::Tensor& rstd, std::string_view activation) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, dweight, dgate] = rms_norm_gate_bwd(dy, x, weight, gate, rstd, activation);
    return {dx, dweight, dgate};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "rms_norm_gate: double backward is not supported");
  }
};

NormForwardOutputs rms_norm_gate_fwd_autograd(const at::Tensor& x, const OptionalTensor& weight,
                                              const OptionalTensor& gate,
                                              std::string_view activation, double eps) {
  refuse_unsupported("rms_norm_gate", {{"x", x}}, {weight, gate});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return rms_norm_gate_fwd(x, weight, gate, activation, eps);
  }
  at::Tensor rstd;
  auto outputs = RmsNormGate::apply(x, weight, gate, activation, eps, &rstd);
  return {outputs[0], rstd};
}

NormBackwardOutputs rms_norm_gate_bwd_autograd(const at::Tensor& dy, const at::Tensor& x,
                                               const OptionalTensor& weight,
                                               const OptionalTensor& gate, const at::Tensor& rstd,
                                               std::string_view activation) {
  refuse_unsupported("rms_norm_gate_bwd", {{"dy", dy}, {"x", x}, {"rstd", rstd}}, {weight, gate});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return rms_norm_gate_bwd(dy, x, weight, gate, rstd, activation);
  }
  auto outputs = RmsNormGateBackward::apply(dy, x, weight, gate, rstd, activation);
  return {outputs[0], outputs[1], outputs[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("rms_norm_gate_fwd", rms_norm_gate_fwd_autograd);
  m.impl("rms_norm_gate_bwd", rms_norm_gate_bwd_autograd);
}

}  // namespace gla_ext
