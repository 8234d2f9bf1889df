// gate_projection under autograd: h and the parameters are saved, z is made again in backward.
#include "checks/gate_projection.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class GateProjection : public torch::autograd::Function<GateProjection> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& h, const at::Tensor& weight,
                            const OptionalTensor& bias, double normalizer,
                            std::optional<double> clamp_min) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({h, weight, or_undefined(bias)});
    ctx->saved_data["normalizer"] = normalizer;
    ctx->saved_data["clamp_min"] = clamp_min;
    ctx->set_materialize_grads(false);
    return gate_projection_fwd(h, weight, bias, normalizer, clamp_min);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor none;
    if (!grads[0].defined()) return {none, none, none, none, none};
    const variable_list saved = ctx->get_saved_variables();
    auto [dh, dweight, dbias] = gate_projection_bwd(
        grads[0], saved[0], saved[1], or_absent(saved[2]), ctx->saved_data["normalizer"].toDouble(),
        ctx->saved_data["clamp_min"].toOptional<double>());
    return {dh, dweight, saved[2].defined() ? dbias : none, none, none};
  }
};

class GateProjectionBackward : public torch::autograd::Function<GateProjectionBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const at::Tensor& dg, const at::Tensor& h,
                               const at::Tensor& weight, const OptionalTensor& bias,
                               double normalizer, std::optional<double> clamp_min) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dh, dweight, dbias] = gate_projection_bwd(dg, h, weight, bias, normalizer, clamp_min);
    return {dh, dweight, dbias};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "gate_projection: double backward is not supported");
  }
};

at::Tensor gate_projection_fwd_autograd(const at::Tensor& h, const at::Tensor& weight,
                                        const OptionalTensor& bias, double normalizer,
                                        std::optional<double> clamp_min) {
  refuse_unsupported("gate_projection", {{"h", h}, {"weight", weight}}, {bias});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return gate_projection_fwd(h, weight, bias, normalizer, clamp_min);
  }
  return GateProjection::apply(h, weight, bias, normalizer, clamp_min);
}

GateProjectionBackwardOutputs gate_projection_bwd_autograd(
    const at::Tensor& dg, const at::Tensor& h, const at::Tensor& weight, const OptionalTensor& bias,
    double normalizer, std::optional<double> clamp_min) {
  refuse_unsupported("gate_projection_bwd", {{"dg", dg}, {"h", h}, {"weight", weight}}, {bias});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return gate_projection_bwd(dg, h, weight, bias, normalizer, clamp_min);
  }
  auto outputs = GateProjectionBackward::apply(dg, h, weight, bias, normalizer, clamp_min);
  return {outputs[0], outputs[1], outputs[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("gate_projection_fwd", gate_projection_fwd_autograd);
  m.impl("gate_projection_bwd", gate_projection_bwd_autograd);
}

}  // namespace gla_ext
