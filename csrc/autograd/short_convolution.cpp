// short_convolution under autograd: forward and backward are the registered operators, nothing but
// the inputs is saved. A bias and a cache that are absent have no gradient.
#include "checks/short_convolution.h"

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "dispatch/differentiable.h"
#include "ops.h"

namespace gla_ext {
namespace {

struct ShortConvolution {
  static constexpr const char *fwd = "short_convolution_fwd", *bwd = "short_convolution_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&, const at::Tensor& x,
                              const at::Tensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& cache, const OptionalTensor& cu_seqlens,
                              bool output_state) {
    save(ctx, {x, weight, bias, cache, cu_seqlens});
    return output_state ? 2 : 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &cache = saved[3];
    const at::Tensor none, dy = grads[0].defined() ? grads[0] : at::zeros_like(x);
    const OptionalTensor dstate = grads.size() > 1 ? or_absent(grads[1]) : std::nullopt;
    auto [dx, dweight, dbias, dcache] = short_convolution_bwd(
        dy, dstate, x, weight, or_absent(bias), or_absent(cache), or_absent(saved[4]));
    return {dx, dweight, bias.defined() ? dbias : none, cache.defined() ? dcache : none};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(ShortConvolution::fwd, Differentiable<short_convolution_fwd, ShortConvolution>::run);
  m.impl(ShortConvolution::bwd, DifferentiableOnce<short_convolution_bwd, ShortConvolution>::run);
}

}  // namespace gla_ext
