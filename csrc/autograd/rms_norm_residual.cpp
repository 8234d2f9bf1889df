// rms_norm_residual under autograd: the stream, which is an output, weight and rstd, one number a
// row, are saved for backward; x and residual are not.
#include <torch/library.h>

#include "checks/rms_norm_gate.h"
#include "dispatch/differentiable.h"
#include "ops.h"

namespace gla_ext {
namespace {

struct RmsNormResidual {
  static constexpr const char *fwd = "rms_norm_residual_fwd", *bwd = "rms_norm_residual_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list& outputs,
                              const at::Tensor& x, const at::Tensor&, const OptionalTensor& weight,
                              double) {
    save(ctx, {/*stream=*/outputs[1], weight, /*rstd=*/outputs[2]});
    ctx->saved_data["dtype"] = x.scalar_type();
    return 2;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor &dy = grads[0], &dstream = grads[1];
    if (!dy.defined()) return {dstream.to(ctx->saved_data["dtype"].toScalarType()), dstream};
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &stream = saved[0], &weight = saved[1], &rstd = saved[2];
    auto [dx, dresidual, dweight] =
        rms_norm_residual_bwd(dy, or_absent(dstream), stream, or_absent(weight), rstd);
    const bool both = dy.scalar_type() == stream.scalar_type();
    return {both ? dresidual : dx, dresidual, weight.defined() ? dweight : at::Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(RmsNormResidual::fwd, Differentiable<rms_norm_residual_fwd, RmsNormResidual>::run);
  m.impl(RmsNormResidual::bwd, DifferentiableOnce<rms_norm_residual_bwd, RmsNormResidual>::run);
}

}  // namespace gla_ext
