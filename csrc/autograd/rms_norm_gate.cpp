// rms_norm_gate under autograd, alone and with the linear map after it: forward and backward are
// the registered operators; x, weight, gate and rstd, one number a row, are saved for backward.
// What the gradient of the map's weight needs of the norm is made again in backward.
#include "checks/rms_norm_gate.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "as_matrix.h"
#include "checks/decode.h"
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
    auto [dx, dweight, dgate, y] =
        rms_norm_gate_bwd(grads[0], x, or_absent(weight), or_absent(gate), rstd,
                          ctx->saved_data["activation"].toStringView(), /*output=*/false);
    return {dx, weight.defined() ? dweight : none, gate.defined() ? dgate : none, none, none, none};
  }
};

class RmsNormGateBackward : public torch::autograd::Function<RmsNormGateBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& gate,
                               const at::Tensor& rstd, std::string_view activation, bool output) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, dweight, dgate, y] = rms_norm_gate_bwd(dy, x, weight, gate, rstd, activation, output);
    return {dx, dweight, dgate, y};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "rms_norm_gate: double backward is not supported");
  }
};

// [..., H V] -> [..., H, V] as o is, and back.
at::Tensor by_heads(const at::Tensor& t, const at::Tensor& o) {
  return t.reshape_symint(o.sym_sizes());
}
at::Tensor side_by_side(const at::Tensor& t) { return t.flatten(-2); }

// The map of the norm, and rstd; by registered operators and torch's, so that a traced graph holds
// no other.
std::tuple<at::Tensor, at::Tensor> linear_of_norm(const at::Tensor& o,
                                                  const OptionalTensor& norm_weight, double eps,
                                                  std::string_view activation,
                                                  const at::Tensor& gate,
                                                  const at::Tensor& weight) {
  check_norm_gate_linear(o, norm_weight, gate, weight);
  // All are what autocast has made of them.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto [y, rstd] = rms_norm_gate_fwd(o, norm_weight, by_heads(gate, o), activation, eps);
  return {at::linear(side_by_side(y), weight), rstd};
}

at::Tensor norm_gate_linear_composed(const at::Tensor& o, const OptionalTensor& norm_weight,
                                     double eps, std::string_view activation,
                                     const at::Tensor& gate, const at::Tensor& weight) {
  return std::get<0>(linear_of_norm(o, norm_weight, eps, activation, gate, weight));
}

class NormGateLinear : public torch::autograd::Function<NormGateLinear> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& o,
                            const OptionalTensor& norm_weight, double eps,
                            std::string_view activation, const at::Tensor& gate,
                            const at::Tensor& weight) {
    auto [result, rstd] = linear_of_norm(o, norm_weight, eps, activation, gate, weight);
    ctx->save_for_backward({o, or_undefined(norm_weight), gate, weight, rstd});
    ctx->saved_data["activation"] = std::string(activation);
    ctx->set_materialize_grads(false);
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::Tensor d_o, dnorm_weight, dgate, dweight, y;
    const at::Tensor none, &d_out = grads[0];
    if (!d_out.defined()) return {none, none, none, none, none, none};
    // In the dtypes of forward, whatever stands around backward.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &o = saved[0], &norm_weight = saved[1], &gate = saved[2], &weight = saved[3];
    // Of the tensors that are given, the last.
    const bool needs_dweight = ctx->needs_input_grad(norm_weight.defined() ? 3 : 2);
    std::tie(d_o, dnorm_weight, dgate, y) = rms_norm_gate_bwd(
        by_heads(at::matmul(d_out, weight), o), o, or_absent(norm_weight), by_heads(gate, o),
        saved[4], ctx->saved_data["activation"].toStringView(), needs_dweight);
    if (needs_dweight) dweight = at::mm(as_matrix(d_out).t(), as_matrix(side_by_side(y)));
    return {d_o,    norm_weight.defined() ? dnorm_weight : none, none, none, side_by_side(dgate),
            dweight};
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
                                               std::string_view activation, bool output) {
  refuse_unsupported("rms_norm_gate_bwd", {{"dy", dy}, {"x", x}, {"rstd", rstd}}, {weight, gate});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return rms_norm_gate_bwd(dy, x, weight, gate, rstd, activation, output);
  }
  auto outputs = RmsNormGateBackward::apply(dy, x, weight, gate, rstd, activation, output);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

at::Tensor norm_gate_linear_autograd(const at::Tensor& o, const OptionalTensor& norm_weight,
                                     double eps, std::string_view activation,
                                     const at::Tensor& gate, const at::Tensor& weight) {
  refuse_unsupported("norm_gate_linear", {{"o", o}, {"gate", gate}, {"weight", weight}},
                     {norm_weight});
  if (!at::GradMode::is_enabled())
    return norm_gate_linear_composed(o, norm_weight, eps, activation, gate, weight);
  return NormGateLinear::apply(o, norm_weight, eps, activation, gate, weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("rms_norm_gate_fwd", rms_norm_gate_fwd_autograd);
  m.impl("rms_norm_gate_bwd", rms_norm_gate_bwd_autograd);
  m.impl("norm_gate_linear", norm_gate_linear_autograd);
}

// Below autograd the same on every device, tracing's too.
TORCH_LIBRARY_IMPL(gla_ext, CompositeExplicitAutograd, m) {
  m.impl("norm_gate_linear", norm_gate_linear_composed);
}

}  // namespace gla_ext
