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

#include "dispatch/as_matrix.h"
#include "checks/decode.h"
#include "dispatch/differentiable.h"
#include "ops.h"
#include "dispatch/refuse.h"

namespace gla_ext {
namespace {

struct RmsNormGate {
  static constexpr const char *fwd = "rms_norm_gate_fwd", *bwd = "rms_norm_gate_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list& outputs,
                              const at::Tensor& x, const OptionalTensor& weight,
                              const OptionalTensor& gate, std::string_view activation, double) {
    save(ctx, {x, weight, gate, /*rstd=*/outputs[1]});
    ctx->saved_data["activation"] = std::string(activation);
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor none, &x = saved[0], &weight = saved[1], &gate = saved[2], &rstd = saved[3];
    auto [dx, dweight, dgate, y] =
        rms_norm_gate_bwd(grads[0], x, or_absent(weight), or_absent(gate), rstd,
                          ctx->saved_data["activation"].toStringView(), /*output=*/false);
    return {dx, weight.defined() ? dweight : none, gate.defined() ? dgate : none};
  }
};

// [..., H V] -> [..., H, V] as o is, and back.
at::Tensor by_heads(const at::Tensor& t, const at::Tensor& o) {
  return t.reshape_symint(o.sym_sizes());
}
at::Tensor side_by_side(const at::Tensor& t) {  // is_grads_batched has no rule for flatten
  auto sizes = t.sym_sizes().vec();
  const c10::SymInt V = sizes.back();
  sizes.pop_back();
  sizes.back() *= V;
  return t.reshape_symint(sizes);
}

// The map of the norm, and rstd; by registered operators and torch's, so that a traced graph holds
// no other.
std::tuple<at::Tensor, at::Tensor> linear_of_norm(const at::Tensor& o, const at::Tensor& gate,
                                                  const at::Tensor& weight,
                                                  const OptionalTensor& norm_weight,
                                                  std::string_view activation, double eps) {
  check_norm_gate_linear(o, gate, weight, norm_weight, activation);
  auto [y, rstd] = rms_norm_gate_fwd(o, norm_weight, by_heads(gate, o), activation, eps);
  return {at::linear(side_by_side(y), weight), rstd};
}

at::Tensor norm_gate_linear_composed(const at::Tensor& o, const at::Tensor& gate,
                                     const at::Tensor& weight, const OptionalTensor& norm_weight,
                                     std::string_view activation, double eps) {
  return std::get<0>(linear_of_norm(o, gate, weight, norm_weight, activation, eps));
}

class NormGateLinear : public torch::autograd::Function<NormGateLinear> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& o, const at::Tensor& gate,
                            const at::Tensor& weight, const OptionalTensor& norm_weight,
                            std::string_view activation, double eps) {
    auto [result, rstd] = linear_of_norm(o, gate, weight, norm_weight, activation, eps);
    ctx->save_for_backward({o, gate, weight, or_undefined(norm_weight), rstd});
    ctx->saved_data["activation"] = std::string(activation);
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::Tensor d_o, dgate, dweight, dnorm_weight, y;
    const at::Tensor none, &d_out = grads[0];
    if (!d_out.defined()) return {none, none, none, none, none, none};
    // In the dtypes of forward, whatever stands around backward.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &o = saved[0], &weight = saved[2], &norm_weight = saved[3];
    const at::Tensor gate = by_heads(saved[1], o);
    const std::string_view activation = ctx->saved_data["activation"].toStringView();
    const bool weighted = norm_weight.defined();
    const bool needs_dweight = ctx->needs_input_grad(2);
    const bool needs_dnorm = ctx->needs_input_grad(0) || ctx->needs_input_grad(1) ||
                             (weighted && ctx->needs_input_grad(3));
    // For create_graph by the norm itself, which can be differentiated.
    const bool with_y = needs_dweight && !at::GradMode::is_enabled();
    if (needs_dnorm) {
      std::tie(d_o, dnorm_weight, dgate, y) =
          rms_norm_gate_bwd(by_heads(at::matmul(d_out, weight), o), o, or_absent(norm_weight), gate,
                            saved[4], activation, with_y);
      dgate = side_by_side(dgate);
    }
    if (needs_dweight) {
      if (!needs_dnorm || !with_y)
        y = std::get<0>(rms_norm_gate_fwd(o, or_absent(norm_weight), gate, activation,
                                          ctx->saved_data["eps"].toDouble()));
      dweight = at::mm(as_matrix(d_out).t(), as_matrix(side_by_side(y)));
    }
    return {d_o, dgate, dweight, weighted ? dnorm_weight : none, none, none};
  }
};

at::Tensor norm_gate_linear_autograd(const at::Tensor& o, const at::Tensor& gate,
                                     const at::Tensor& weight, const OptionalTensor& norm_weight,
                                     std::string_view activation, double eps) {
  refuse_unsupported("norm_gate_linear", o, gate, weight, norm_weight);
  const bool trains_norm = o.requires_grad() || gate.requires_grad() ||
                           (given(norm_weight) && norm_weight->requires_grad());
  // Of a norm that has no gradient, the result is all that need be kept.
  if (!at::GradMode::is_enabled() || !trains_norm)
    return norm_gate_linear_composed(o, gate, weight, norm_weight, activation, eps);
  return NormGateLinear::apply(o, gate, weight, norm_weight, activation, eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(RmsNormGate::fwd, Differentiable<rms_norm_gate_fwd, RmsNormGate>::run);
  m.impl(RmsNormGate::bwd, DifferentiableOnce<rms_norm_gate_bwd, RmsNormGate>::run);
  m.impl("norm_gate_linear", norm_gate_linear_autograd);
}

// Below autograd the same on every device, tracing's too.
TORCH_LIBRARY_IMPL(gla_ext, CompositeExplicitAutograd, m) {
  m.impl("norm_gate_linear", norm_gate_linear_composed);
}

}  // namespace gla_ext
