// Cross entropy. Nothing wider than the logits is saved; backward may write over them.
#include "op.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "dispatch/checker.h"
#include "dispatch/differentiable.h"
#include "dispatch/in_place.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"

namespace gla_ext {

CrossEntropyForwardOutputs cross_entropy_fwd(const at::Tensor& logits, const at::Tensor& target,
                                             int64_t ignore_index, double label_smoothing,
                                             double logit_scale,
                                             std::optional<double> logit_softcapping,
                                             double lse_square_scale, bool inplace_backward) {
  static const Op<decltype(cross_entropy_fwd)> op("gla_ext::cross_entropy_fwd");
  return op(logits, target, ignore_index, label_smoothing, logit_scale, logit_softcapping,
            lse_square_scale, inplace_backward);
}

at::Tensor cross_entropy_bwd(const at::Tensor& dloss, const at::Tensor& logits,
                             const at::Tensor& target, const at::Tensor& lse, int64_t ignore_index,
                             double label_smoothing, double logit_scale,
                             std::optional<double> logit_softcapping, double lse_square_scale) {
  static const Op<decltype(cross_entropy_bwd)> op("gla_ext::cross_entropy_bwd");
  return op(dloss, logits, target, lse, ignore_index, label_smoothing, logit_scale,
            logit_softcapping, lse_square_scale);
}

void cross_entropy_bwd_(const at::Tensor& dloss, at::Tensor& logits, const at::Tensor& target,
                        const at::Tensor& lse, int64_t ignore_index, double label_smoothing,
                        double logit_scale, std::optional<double> logit_softcapping,
                        double lse_square_scale) {
  static const Op<decltype(cross_entropy_bwd_)> op("gla_ext::cross_entropy_bwd_");
  op(dloss, logits, target, lse, ignore_index, label_smoothing, logit_scale, logit_softcapping,
     lse_square_scale);
}

at::Tensor cross_entropy_with_grad_(at::Tensor& logits, const at::Tensor& target,
                                    int64_t ignore_index, double label_smoothing,
                                    double logit_scale, std::optional<double> logit_softcapping,
                                    double lse_square_scale) {
  static const Op<decltype(cross_entropy_with_grad_)> op("gla_ext::cross_entropy_with_grad_");
  return op(logits, target, ignore_index, label_smoothing, logit_scale, logit_softcapping,
            lse_square_scale);
}

// Checks of the operators' arguments.
CrossEntropyOptions CrossEntropyArguments::checked(const char* op) const {
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1, op,
                    ": expected label_smoothing to be between 0 and 1, got ", label_smoothing);
  TORCH_CHECK_VALUE(!logit_softcapping.has_value() || *logit_softcapping > 0, op,
                    ": expected logit_softcapping to be above 0, got ",
                    logit_softcapping.value_or(0));
  return {ignore_index, label_smoothing, logit_scale, logit_softcapping.value_or(0),
          lse_square_scale};
}

CrossEntropyCall check_cross_entropy(const char* op, const at::Tensor& logits,
                                     const at::Tensor& target, const CrossEntropyArguments& options,
                                     bool written, const at::Tensor* dloss, const at::Tensor* lse) {
  const Checker check(op, "logits", logits);
  check.defined("target", target);
  check.strided("logits", logits);
  check.floating("logits", logits);
  check.rank("logits", logits, 2, "[N, V]");
  check.at_least_one("the last dimension", "logits", logits.sym_size(1));
  check.indices("target", target, "[N]");
  check.shape("target", target, "[N]", {logits.sym_size(0)});
  const at::ScalarType accumulate = accumulate_of(logits);
  for (const auto& [name, t] : {std::pair{"dloss", dloss}, std::pair{"lse", lse}}) {
    if (t == nullptr) continue;
    check.placed(name, *t);
    check.dtype(name, *t, accumulate, "");
    check.shape(name, *t, "[N]", {logits.sym_size(0)});
  }
  const CrossEntropyOptions checked = options.checked(op);
  TORCH_CHECK_VALUE(!written || logits.sym_stride(1) == 1 || logits.sym_size(1) == 1, op,
                    ": expected the rows of logits, which are written over, to be contiguous, got "
                    "strides ",
                    logits.sym_strides());
  return {op, logits, target, checked, accumulate};
}

void check_labels(const char* op, const at::Tensor& target, int64_t V, int64_t ignored) {
  AT_DISPATCH_INDEX_TYPES(target.scalar_type(), "check_labels", [&] {
    const index_t* labels = target.const_data_ptr<index_t>();
    for (int64_t i = 0; i < target.size(0); ++i) {
      const int64_t label = labels[i * target.stride(0)];
      TORCH_CHECK_VALUE((label >= 0 && label < V) || label == ignored, op,
                        ": expected labels from 0 to V - 1 = ", V - 1,
                        ", or ignore_index = ", ignored, ", got ", label, " at ", i);
    }
  });
}

namespace {

// While a graph is traced nothing is run.
struct Traced {
  static void forward(const CrossEntropyCall&, const at::Tensor&, const at::Tensor&,
                      const at::Tensor&) {}
  static void backward(const CrossEntropyCall&, const at::Tensor&, const at::Tensor&,
                       const at::Tensor&) {}
  static void with_grad(const CrossEntropyCall&, const at::Tensor&) {}
};

// The gradient by torch's operations, for double backward, or for several gradients at once.
at::Tensor differentiable_gradient(const at::Tensor& dloss, const at::Tensor& logits,
                                   const at::Tensor& target, const CrossEntropyArguments& o) {
  at::Tensor s = logits.to(accumulate_of(logits)) * o.logit_scale, slope;
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
                              const CrossEntropyForward& a) {
    ctx->save_for_backward({a.logits, a.target, /*lse=*/outputs[2]});
    ctx->saved_data["ignore_index"] = a.options.ignore_index;
    ctx->saved_data["label_smoothing"] = a.options.label_smoothing;
    ctx->saved_data["logit_scale"] = a.options.logit_scale;
    ctx->saved_data["logit_softcapping"] = a.options.logit_softcapping;
    ctx->saved_data["lse_square_scale"] = a.options.lse_square_scale;
    ctx->saved_data["inplace_backward"] = a.inplace_backward;
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &dloss = grads[0], &logits = saved[0], &target = saved[1], &lse = saved[2];
    auto& data = ctx->saved_data;
    const CrossEntropyArguments o{data["ignore_index"].toInt(), data["label_smoothing"].toDouble(),
                                  data["logit_scale"].toDouble(),
                                  data["logit_softcapping"].toOptional<double>(),
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

// For errors of cross_entropy_bwd, which name that operator and not cross_entropy_fwd: the latter
// can be differentiated twice, through torch's operations (see differentiable_gradient).
struct CrossEntropyTwice {
  static constexpr const char *fwd = CrossEntropy::bwd, *bwd = CrossEntropy::bwd;
};

constexpr const char* kWrittenOver =
    "no gradient passes what is written over, call it in torch.no_grad()";
constexpr Refusal kBackward{"cross_entropy_bwd_", kWrittenOver};
constexpr Refusal kWithGrad{"cross_entropy_with_grad_", kWrittenOver};

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  const std::string options =
      "int ignore_index, float label_smoothing, float logit_scale, float? logit_softcapping, float "
      "lse_square_scale";
  define(m, "cross_entropy_fwd(Tensor logits, Tensor target, " + options +
                ", bool inplace_backward) -> (Tensor loss, Tensor z_loss, Tensor lse)");
  define(m, "cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor target, Tensor lse, " + options +
                ") -> Tensor");
  define(m, "cross_entropy_bwd_(Tensor dloss, Tensor(a!) logits, Tensor target, Tensor lse, " +
                options + ") -> ()");
  define(m,
         "cross_entropy_with_grad_(Tensor(a!) logits, Tensor target, " + options + ") -> Tensor");
  in_place<cross_entropy_bwd_, kBackward>(m, kBackward.op);
  in_place<cross_entropy_with_grad_, kWithGrad>(m, kWithGrad.op);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { CrossEntropyOn<Traced>::register_in(m); }

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(CrossEntropy::fwd, Differentiable<cross_entropy_fwd, CrossEntropy>::run);
  m.impl(CrossEntropy::bwd, DifferentiableOnce<cross_entropy_bwd, CrossEntropyTwice>::run);
}

}  // namespace gla_ext
