// Cross entropy under autograd. Of the logits nothing wider is saved; backward may write over them.
#include "checks/cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& target, int64_t ignore_index, double label_smoothing,
                            double logit_scale, std::optional<double> logit_softcapping,
                            double lse_square_scale, bool inplace_backward,
                            variable_list* not_differentiable) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [loss, z_loss, lse] =
        cross_entropy_fwd(logits, target, ignore_index, label_smoothing, logit_scale,
                          logit_softcapping, lse_square_scale, inplace_backward);
    ctx->save_for_backward({logits, target, lse});
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["logit_scale"] = logit_scale;
    ctx->saved_data["logit_softcapping"] = logit_softcapping;
    ctx->saved_data["lse_square_scale"] = lse_square_scale;
    ctx->saved_data["inplace_backward"] = inplace_backward;
    ctx->set_materialize_grads(false);
    *not_differentiable = {z_loss, lse};
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(9);
    const at::Tensor& dloss = grads[0];
    if (!dloss.defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    at::Tensor logits = saved[0];
    const at::Tensor &target = saved[1], &lse = saved[2];
    auto& data = ctx->saved_data;
    const Options o{data["ignore_index"].toInt(), data["label_smoothing"].toDouble(),
                    data["logit_scale"].toDouble(), data["logit_softcapping"].toOptional<double>(),
                    data["lse_square_scale"].toDouble()};
    if (at::GradMode::is_enabled() || dloss.key_set().has(c10::DispatchKey::Batched)) {
      results[0] = differentiable_gradient(dloss, logits, target, o);
    } else if (data["inplace_backward"].toBool()) {
      results[0] = logits.detach();
      cross_entropy_bwd_(dloss, results[0], target, lse, o.ignore_index, o.label_smoothing,
                         o.logit_scale, o.logit_softcapping, o.lse_square_scale);
    } else {
      results[0] = cross_entropy_bwd(dloss, logits, target, lse, o.ignore_index, o.label_smoothing,
                                     o.logit_scale, o.logit_softcapping, o.lse_square_scale);
    }
    return results;
  }
};

CrossEntropyForwardOutputs cross_entropy_fwd_autograd(
    const at::Tensor& logits, const at::Tensor& target, int64_t ignore_index,
    double label_smoothing, double logit_scale, std::optional<double> logit_softcapping,
    double lse_square_scale, bool inplace_backward) {
  refuse_unsupported("cross_entropy", {{"logits", logits}, {"target", target}}, {});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return cross_entropy_fwd(logits, target, ignore_index, label_smoothing, logit_scale,
                             logit_softcapping, lse_square_scale, inplace_backward);
  }
  variable_list others;
  const at::Tensor loss =
      CrossEntropy::apply(logits, target, ignore_index, label_smoothing, logit_scale,
                          logit_softcapping, lse_square_scale, inplace_backward, &others);
  return {loss, others[0], others[1]};
}

class CrossEntropyBackward : public torch::autograd::Function<CrossEntropyBackward> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext*, const at::Tensor& dloss, const at::Tensor& logits,
                            const at::Tensor& target, const at::Tensor& lse, int64_t ignore_index,
                            double label_smoothing, double logit_scale,
                            std::optional<double> logit_softcapping, double lse_square_scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    return cross_entropy_bwd(dloss, logits, target, lse, ignore_index, label_smoothing, logit_scale,
                             logit_softcapping, lse_square_scale);
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "cross_entropy_bwd: double backward is not supported");
  }
};

at::Tensor cross_entropy_bwd_autograd(const at::Tensor& dloss, const at::Tensor& logits,
                                      const at::Tensor& target, const at::Tensor& lse,
                                      int64_t ignore_index, double label_smoothing,
                                      double logit_scale, std::optional<double> logit_softcapping,
                                      double lse_square_scale) {
  refuse_unsupported("cross_entropy_bwd", {{"dloss", dloss}, {"logits", logits}, {"lse", lse}}, {});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return cross_entropy_bwd(dloss, logits, target, lse, ignore_index, label_smoothing, logit_scale,
                             logit_softcapping, lse_square_scale);
  }
  return CrossEntropyBackward::apply(dloss, logits, target, lse, ignore_index, label_smoothing,
                                     logit_scale, logit_softcapping, lse_square_scale);
}

// What writes over the logits has no gradient of its own.
void refuse_gradient(const char* op, const at::Tensor& logits) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !logits.requires_grad(), op,
                              ": no gradient passes what is written over, call it in "
                              "torch.no_grad()");
}

void cross_entropy_bwd_over_logits_autograd(const at::Tensor& dloss, at::Tensor& logits,
                                            const at::Tensor& target, const at::Tensor& lse,
                                            int64_t ignore_index, double label_smoothing,
                                            double logit_scale,
                                            std::optional<double> logit_softcapping,
                                            double lse_square_scale) {
  const char* op = "cross_entropy_bwd_";
  refuse_unsupported(op, {{"dloss", dloss}, {"logits", logits}, {"lse", lse}}, {});
  refuse_gradient(op, logits);
  at::AutoDispatchBelowAutograd below;
  cross_entropy_bwd_(dloss, logits, target, lse, ignore_index, label_smoothing, logit_scale,
                     logit_softcapping, lse_square_scale);
}

// One key below, where inference mode passes too: autograd, which may have saved the logits, learns
// that they are written to.
void cross_entropy_bwd_over_logits_and_tell(const at::Tensor& dloss, at::Tensor& logits,
                                            const at::Tensor& target, const at::Tensor& lse,
                                            int64_t ignore_index, double label_smoothing,
                                            double logit_scale,
                                            std::optional<double> logit_softcapping,
                                            double lse_square_scale) {
  {
    at::AutoDispatchBelowADInplaceOrView below;
    cross_entropy_bwd_(dloss, logits, target, lse, ignore_index, label_smoothing, logit_scale,
                       logit_softcapping, lse_square_scale);
  }
  tell_autograd(logits);
}

at::Tensor cross_entropy_with_grad_autograd(at::Tensor& logits, const at::Tensor& target,
                                            int64_t ignore_index, double label_smoothing,
                                            double logit_scale,
                                            std::optional<double> logit_softcapping,
                                            double lse_square_scale) {
  const char* op = "cross_entropy_with_grad_";
  refuse_unsupported(op, {{"logits", logits}, {"target", target}}, {});
  refuse_gradient(op, logits);
  at::AutoDispatchBelowAutograd below;
  return cross_entropy_with_grad_(logits, target, ignore_index, label_smoothing, logit_scale,
                                  logit_softcapping, lse_square_scale);
}

at::Tensor cross_entropy_with_grad_and_tell(at::Tensor& logits, const at::Tensor& target,
                                            int64_t ignore_index, double label_smoothing,
                                            double logit_scale,
                                            std::optional<double> logit_softcapping,
                                            double lse_square_scale) {
  at::Tensor loss;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    loss = cross_entropy_with_grad_(logits, target, ignore_index, label_smoothing, logit_scale,
                                    logit_softcapping, lse_square_scale);
  }
  tell_autograd(logits);
  return loss;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("cross_entropy_fwd", cross_entropy_fwd_autograd);
  m.impl("cross_entropy_bwd", cross_entropy_bwd_autograd);
  m.impl("cross_entropy_bwd_", cross_entropy_bwd_over_logits_autograd);
  m.impl("cross_entropy_with_grad_", cross_entropy_with_grad_autograd);
}

TORCH_LIBRARY_IMPL(gla_ext, ADInplaceOrView, m) {
  m.impl("cross_entropy_bwd_", cross_entropy_bwd_over_logits_and_tell);
  m.impl("cross_entropy_with_grad_", cross_entropy_with_grad_and_tell);
}

}  // namespace gla_ext
