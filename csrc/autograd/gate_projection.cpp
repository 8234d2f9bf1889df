// gate_projection under autograd: h and the parameters are saved, z is made again in backward.
#include "checks/gate_projection.h"

#include <torch/library.h>

#include "dispatch/differentiable.h"
#include "ops.h"

namespace gla_ext {
namespace {

struct GateProjection {
  static constexpr const char *fwd = "gate_projection_fwd", *bwd = "gate_projection_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&, const at::Tensor& h,
                              const at::Tensor& weight, const OptionalTensor& bias,
                              double normalizer, std::optional<double> clamp_min) {
    save(ctx, {h, weight, bias});
    ctx->saved_data["normalizer"] = normalizer;
    ctx->saved_data["clamp_min"] = clamp_min;
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dh, dweight, dbias] = gate_projection_bwd(
        grads[0], saved[0], saved[1], or_absent(saved[2]), ctx->saved_data["normalizer"].toDouble(),
        ctx->saved_data["clamp_min"].toOptional<double>());
    return {dh, dweight, saved[2].defined() ? dbias : at::Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(GateProjection::fwd, Differentiable<gate_projection_fwd, GateProjection>::run);
  m.impl(GateProjection::bwd, DifferentiableOnce<gate_projection_bwd, GateProjection>::run);
}

}  // namespace gla_ext
