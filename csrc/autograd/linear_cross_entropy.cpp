// The linear map of cross entropy under autograd: forward has made the gradients of its sum, which
// backward scales.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "checks/cross_entropy.h"
#include "ops.h"
#include "dispatch/refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, const at::Tensor& target,
                            int64_t ignore_index, double label_smoothing, double logit_scale,
                            std::optional<double> logit_softcapping, int64_t num_chunks,
                            bool with_dx, bool with_dweight) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [loss, dx, dweight, dbias] =
        linear_cross_entropy_fwd(x, weight, bias, target, ignore_index, label_smoothing,
                                 logit_scale, logit_softcapping, num_chunks, with_dx, with_dweight);
    ctx->save_for_backward({dx, dweight, dbias});
    ctx->saved_data["dtype"] = weight.scalar_type();
    ctx->saved_data["bias"] = given(bias);
    ctx->set_materialize_grads(false);
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(11);
    const at::Tensor& dloss = grads[0];
    if (!dloss.defined()) return results;
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "linear_cross_entropy: double backward is not supported");
    const variable_list saved = ctx->get_saved_variables();
    const auto dtype = ctx->saved_data["dtype"].toScalarType();
    // Rounded once, in one pass.
    const auto scaled = [&](const at::Tensor& sum) {
      at::Tensor result = at::empty_symint(sum.sym_sizes(), sum.options().dtype(dtype));
      return at::mul_out(result, sum, dloss);
    };
    if (ctx->needs_input_grad(0)) results[0] = scaled(saved[0]);
    if (ctx->needs_input_grad(1)) results[1] = scaled(saved[1]);
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) results[2] = scaled(saved[2]);
    return results;
  }
};

LinearCrossEntropyOutputs linear_cross_entropy_fwd_autograd(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  refuse_unsupported("linear_cross_entropy_fwd", x, weight, bias, target);
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return linear_cross_entropy_fwd(x, weight, bias, target, ignore_index, label_smoothing,
                                    logit_scale, logit_softcapping, num_chunks, with_dx,
                                    with_dweight);
  }
  // Under autograd the gradients are its own, and made where they are wanted.
  const bool wants_dx = x.requires_grad();
  const bool wants_dweight = weight.requires_grad() || (given(bias) && bias->requires_grad());
  const at::Tensor loss =
      LinearCrossEntropy::apply(x, weight, bias, target, ignore_index, label_smoothing, logit_scale,
                                logit_softcapping, num_chunks, wants_dx, wants_dweight);
  const auto none = [](const at::Tensor& like, at::ScalarType dtype) {
    return at::empty({0}, like.options().dtype(dtype));
  };
  return {loss, none(x, x.scalar_type()), none(x, loss.scalar_type()), none(x, loss.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_autograd);
}

}  // namespace gla_ext
