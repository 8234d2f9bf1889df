#include "cross_entropy.h"

#include <ATen/Dispatch.h>

#include "dispatch/checker.h"

namespace gla_ext {
namespace {

CrossEntropyOptions check_options(const char* op, int64_t ignore_index, double label_smoothing,
                                  double logit_scale, std::optional<double> logit_softcapping,
                                  double lse_square_scale) {
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1, op,
                    ": expected label_smoothing to be between 0 and 1, got ", label_smoothing);
  TORCH_CHECK_VALUE(!logit_softcapping.has_value() || *logit_softcapping > 0, op,
                    ": expected logit_softcapping to be above 0, got ",
                    logit_softcapping.value_or(0));
  return {ignore_index, label_smoothing, logit_scale, logit_softcapping.value_or(0),
          lse_square_scale};
}

at::ScalarType accumulate_of(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

CrossEntropyCall check_logits(const Checker& check, const char* op, const at::Tensor& logits,
                              const at::Tensor& target) {
  check.defined("target", target);
  check.strided("logits", logits);
  check.floating("logits", logits);
  check.rank("logits", logits, 2, "[N, V]");
  check.at_least_one("the last dimension", "logits", logits.sym_size(1));
  check.indices("target", target, "[N]");
  check.shape("target", target, "[N]", {logits.sym_size(0)});
  CrossEntropyCall call;
  call.N = logits.sym_size(0), call.V = logits.sym_size(1);
  call.accumulate = accumulate_of(logits);
  return call;
}

}  // namespace

CrossEntropyCall check_cross_entropy_fwd(const at::Tensor& logits, const at::Tensor& target,
                                         int64_t ignore_index, double label_smoothing,
                                         double logit_scale,
                                         std::optional<double> logit_softcapping,
                                         double lse_square_scale) {
  const char* op = "cross_entropy";
  CrossEntropyCall call = check_logits(Checker(op, "logits", logits), op, logits, target);
  call.options = check_options(op, ignore_index, label_smoothing, logit_scale, logit_softcapping,
                               lse_square_scale);
  return call;
}

CrossEntropyCall check_cross_entropy_bwd(const at::Tensor& dloss, const at::Tensor& logits,
                                         const at::Tensor& target, const at::Tensor& lse,
                                         int64_t ignore_index, double label_smoothing,
                                         double logit_scale,
                                         std::optional<double> logit_softcapping,
                                         double lse_square_scale) {
  const char* op = "cross_entropy_bwd";
  const Checker check(op, "logits", logits);
  CrossEntropyCall call = check_logits(check, op, logits, target);
  for (const auto& [name, t] : {std::pair{"dloss", &dloss}, std::pair{"lse", &lse}}) {
    check.defined(name, *t);
    check.strided(name, *t);
    check.device(name, *t);
    check.dtype(name, *t, call.accumulate, "");
    check.shape(name, *t, "[N]", {call.N});
  }
  call.options = check_options(op, ignore_index, label_smoothing, logit_scale, logit_softcapping,
                               lse_square_scale);
  return call;
}

void check_writable_rows(const char* op, const at::Tensor& logits) {
  TORCH_CHECK_VALUE(logits.sym_stride(1) == 1 || logits.sym_size(1) == 1, op,
                    ": expected the rows of logits, which are written over, to be contiguous, got "
                    "strides ",
                    logits.sym_strides());
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

CrossEntropyCall check_linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight,
                                            const OptionalTensor& bias, const at::Tensor& target,
                                            int64_t ignore_index, double label_smoothing,
                                            double logit_scale,
                                            std::optional<double> logit_softcapping,
                                            int64_t num_chunks) {
  const char* op = "linear_cross_entropy";
  const Checker check(op, "x", x);
  std::vector<std::pair<const char*, const at::Tensor*>> parameters{{"weight", &weight}};
  if (given(bias)) parameters.push_back({"bias", &*bias});
  check.strided("x", x);
  check.floating("x", x);
  for (const auto& [name, t] : parameters) {
    check.defined(name, *t);
    check.strided(name, *t);
    check.device(name, *t);
    check.like_first(name, *t, x.scalar_type());
  }
  check.defined("target", target);
  check.rank("x", x, 2, "[N, D]");
  check.rank("weight", weight, 2, "[V, D]");
  CrossEntropyCall call;
  call.N = x.sym_size(0), call.V = weight.sym_size(0);
  call.accumulate = accumulate_of(x);
  check.shape("weight", weight, "[V, D]", {call.V, x.sym_size(1)});
  check.at_least_one("the first dimension", "weight", call.V);
  if (given(bias)) check.shape("bias", *bias, "[V]", {call.V});
  check.indices("target", target, "[N]");
  check.shape("target", target, "[N]", {call.N});
  TORCH_CHECK_VALUE(num_chunks >= 1, op, ": expected num_chunks to be at least 1, got ",
                    num_chunks);
  call.options =
      check_options(op, ignore_index, label_smoothing, logit_scale, logit_softcapping, 0);
  return call;
}

}  // namespace gla_ext
