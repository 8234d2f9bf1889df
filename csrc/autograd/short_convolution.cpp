// short_convolution under autograd: forward and backward are the registered operators, nothing but
// the inputs is saved. A bias and a cache that are absent have no gradient.
#include "checks/short_convolution.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class ShortConvolution : public torch::autograd::Function<ShortConvolution> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& cache,
                               const OptionalTensor& cu_seqlens, bool output_state,
                               at::Tensor* not_differentiable) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, state] = short_convolution_fwd(x, weight, bias, cache, cu_seqlens, output_state);
    ctx->save_for_backward(
        {x, weight, or_undefined(bias), or_undefined(cache), or_undefined(cu_seqlens)});
    ctx->saved_data["output_state"] = output_state;
    ctx->set_materialize_grads(false);
    if (output_state) return {y, state};
    // Around the Function: compiled autograd refuses outputs that are marked as
    // non-differentiable.
    *not_differentiable = state;
    return {y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &cache = saved[3];
    const at::Tensor dy = grads[0].defined() ? grads[0] : at::zeros_like(x);
    const at::Tensor dstate = ctx->saved_data["output_state"].toBool() ? grads[1] : at::Tensor();
    auto [dx, dweight, dbias, dcache] = short_convolution_bwd(
        dy, or_absent(dstate), x, weight, or_absent(bias), or_absent(cache), or_absent(saved[4]));
    const at::Tensor none;
    return {dx,   dweight, bias.defined() ? dbias : none, cache.defined() ? dcache : none, none,
            none, none};
  }
};

class ShortConvolutionBackward : public torch::autograd::Function<ShortConvolutionBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const at::Tensor& dy, const OptionalTensor& dstate,
                               const at::Tensor& x, const at::Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& cache,
                               const OptionalTensor& cu_seqlens) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, dweight, dbias, dcache] =
        short_convolution_bwd(dy, dstate, x, weight, bias, cache, cu_seqlens);
    return {dx, dweight, dbias, dcache};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "ShortConvolution: double backward is not supported");
  }
};

ConvolutionForwardOutputs short_convolution_fwd_autograd(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& cache, const OptionalTensor& cu_seqlens, bool output_state) {
  refuse_unsupported("ShortConvolution", {{"x", x}, {"weight", weight}}, {bias, cache});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return short_convolution_fwd(x, weight, bias, cache, cu_seqlens, output_state);
  }
  at::Tensor without_gradient;
  auto outputs =
      ShortConvolution::apply(x, weight, bias, cache, cu_seqlens, output_state, &without_gradient);
  return {outputs[0], output_state ? outputs[1] : without_gradient};
}

ConvolutionBackwardOutputs short_convolution_bwd_autograd(
    const at::Tensor& dy, const OptionalTensor& dstate, const at::Tensor& x,
    const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& cache,
    const OptionalTensor& cu_seqlens) {
  refuse_unsupported("short_convolution_bwd", {{"dy", dy}, {"x", x}, {"weight", weight}},
                     {dstate, bias, cache});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return short_convolution_bwd(dy, dstate, x, weight, bias, cache, cu_seqlens);
  }
  auto outputs = ShortConvolutionBackward::apply(dy, dstate, x, weight, bias, cache, cu_seqlens);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("short_convolution_fwd", short_convolution_fwd_autograd);
  m.impl("short_convolution_bwd", short_convolution_bwd_autograd);
}

}  // namespace gla_ext
