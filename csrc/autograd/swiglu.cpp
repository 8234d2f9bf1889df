// SwiGLU under autograd, alone and with the linear map after it. Nothing but the inputs is saved:
// what the gradient of the map's weight needs of the product is made again in backward.
#include "checks/swiglu.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "as_matrix.h"
#include "dispatch/differentiable.h"
#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

struct Swiglu {
  static constexpr const char *fwd = "swiglu_fwd", *bwd = "swiglu_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&, const at::Tensor& gate,
                              const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dgate, dup, y] = swiglu_bwd(grads[0], saved[0], saved[1], /*product=*/false);
    return {dgate, dup};
  }
};

// By registered operators and torch's, so that a traced graph holds no other.
at::Tensor linear_of_product(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                             const OptionalTensor& bias) {
  check_swiglu_linear(gate, up, weight, bias);
  return at::linear(swiglu_fwd(gate, up), weight, bias);
}

class SwigluLinear : public torch::autograd::Function<SwigluLinear> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up,
                            const at::Tensor& weight, const OptionalTensor& bias) {
    ctx->save_for_backward({gate, up, weight});
    ctx->saved_data["bias"] = given(bias);
    ctx->set_materialize_grads(false);
    return linear_of_product(gate, up, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::Tensor dgate, dup, dweight, dbias;
    const at::Tensor& d_out = grads[0];
    if (!d_out.defined()) return {dgate, dup, dweight, dbias};
    // In the dtypes of forward, whatever stands around backward.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &weight = saved[2];
    const bool needs_dweight = ctx->needs_input_grad(2);
    at::Tensor y;
    if (ctx->needs_input_grad(0) || ctx->needs_input_grad(1))
      std::tie(dgate, dup, y) = swiglu_bwd(at::matmul(d_out, weight), gate, up, needs_dweight);
    else if (needs_dweight)
      y = swiglu_fwd(gate, up);
    if (needs_dweight) dweight = at::mm(as_matrix(d_out).t(), as_matrix(y));
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(3))
      dbias = as_matrix(d_out).sum(0);
    return {dgate, dup, dweight, dbias};
  }
};

at::Tensor swiglu_linear_autograd(const at::Tensor& gate, const at::Tensor& up,
                                  const at::Tensor& weight, const OptionalTensor& bias) {
  refuse_unsupported("swiglu_linear", gate, up, weight, bias);
  if (!at::GradMode::is_enabled()) return linear_of_product(gate, up, weight, bias);
  return SwigluLinear::apply(gate, up, weight, bias);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(Swiglu::fwd, Differentiable<swiglu_fwd, Swiglu>::run);
  m.impl(Swiglu::bwd, DifferentiableOnce<swiglu_bwd, Swiglu>::run);
  m.impl("swiglu_linear", swiglu_linear_autograd);
}

// Below autograd the same on every device, tracing's too.
TORCH_LIBRARY_IMPL(gla_ext, CompositeExplicitAutograd, m) {
  m.impl("swiglu_linear", linear_of_product);
}

}  // namespace gla_ext
