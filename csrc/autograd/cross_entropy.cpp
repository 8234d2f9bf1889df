// Cross entropy under autograd. Of the logits nothing wider is saved; backward may write over them.
#include "checks/cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "dispatch/differentiable.h"
#include "dispatch/in_place.h"
#include "ops.h"

namespace gla_ext {
namespace {

struct Options {
  int64_t ignore_index;
  double label_smoothing, logit_scale;
  std::optional<double> logit_softcapping;
  double lse_square_scale;
};

// The gradient by torch's operations, to be differentiated again, or of several gradients at once.
at::Tensor differentiable_gradient(const at::Tensor& dloss, const at::Tensor& logits,
                                   const at::Tensor& target, const Options& o) {
  const auto wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor s = logits.to(wide) * o.logit_scale, slope;
  if (o.logit_softcapping.has_value()) {
    const at::Tensor t = (s / *o.logit_softcapping).tanh();
    slope = 1 - t * t;
    s = *o.logit_softcapping * t;
  }
  const at::Tensor counts = (target != o.ignore_index).unsqueeze(1);
  const at::Tensor label = target.to(at::kLong).unsqueeze(1).where(counts, 0);
  at::Tensor d = s.softmax(-1);
  if (o.lse_square_scale != 0)
    d = (1 + 2 * o.lse_square_scale * s.logsumexp(-1, /*keepdim=*/true)) * d;
  d = d - at::zeros_like(s).scatter(1, label, 1 - o.label_smoothing);
  if (o.label_smoothing != 0) d = d - o.label_smoothing / s.sym_size(1);
  d = d.where(counts, 0) * dloss.unsqueeze(-1) * o.logit_scale;
  return (slope.defined() ? d * slope : d).to(logits.scalar_type());
}

struct CrossEntropy {
  static constexpr const char *fwd = "cross_entropy_fwd", *bwd = "cross_entropy_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list& outputs,
                              const at::Tensor& logits, const at::Tensor& target,
                              int64_t ignore_index, double label_smoothing, double logit_scale,
                              std::optional<double> logit_softcapping, double lse_square_scale,
                              bool inplace_backward) {
    ctx->save_for_backward({logits, target, /*lse=*/outputs[2]});
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["logit_scale"] = logit_scale;
    ctx->saved_data["logit_softcapping"] = logit_softcapping;
    ctx->saved_data["lse_square_scale"] = lse_square_scale;
    ctx->saved_data["inplace_backward"] = inplace_backward;
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &dloss = grads[0], &logits = saved[0], &target = saved[1], &lse = saved[2];
    auto& data = ctx->saved_data;
    const Options o{data["ignore_index"].toInt(), data["label_smoothing"].toDouble(),
                    data["logit_scale"].toDouble(), data["logit_softcapping"].toOptional<double>(),
                    data["lse_square_scale"].toDouble()};
    if (at::GradMode::is_enabled() || dloss.key_set().has(c10::DispatchKey::Batched))
      return {differentiable_gradient(dloss, logits, target, o)};
    if (!data["inplace_backward"].toBool())
      return {cross_entropy_bwd(dloss, logits, target, lse, o.ignore_index, o.label_smoothing,
                                o.logit_scale, o.logit_softcapping, o.lse_square_scale)};
    at::Tensor dlogits = logits.detach();
    cross_entropy_bwd_(dloss, dlogits, target, lse, o.ignore_index, o.label_smoothing,
                       o.logit_scale, o.logit_softcapping, o.lse_square_scale);
    return {dlogits};
  }
};

// Named by itself: a gradient of the gradient is torch's, see differentiable_gradient.
struct CrossEntropyBackward {
  static constexpr const char *fwd = CrossEntropy::bwd, *bwd = CrossEntropy::bwd;
};

constexpr const char* kWrittenOver =
    "no gradient passes what is written over, call it in torch.no_grad()";
constexpr Refusal kBackward{"cross_entropy_bwd_", kWrittenOver};
constexpr Refusal kWithGrad{"cross_entropy_with_grad_", kWrittenOver};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(CrossEntropy::fwd, Differentiable<cross_entropy_fwd, CrossEntropy>::run);
  m.impl(CrossEntropy::bwd, DifferentiableOnce<cross_entropy_bwd, CrossEntropyBackward>::run);
  m.impl(kBackward.op, InPlace<cross_entropy_bwd_>::refuse<kBackward>);
  m.impl(kWithGrad.op, InPlace<cross_entropy_with_grad_>::refuse<kWithGrad>);
}

TORCH_LIBRARY_IMPL(gla_ext, ADInplaceOrView, m) {
  m.impl(kBackward.op, InPlace<cross_entropy_bwd_>::run_and_tell);
  m.impl(kWithGrad.op, InPlace<cross_entropy_with_grad_>::run_and_tell);
}

}  // namespace gla_ext
