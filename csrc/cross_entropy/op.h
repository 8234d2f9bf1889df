// Cross entropy: what the operators take, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include "common/cross_entropy.h"
#include "common/shape.h"
#include "dispatch/meta.h"
#include "ops.h"

namespace gla_ext {

// The options as operators take them.
struct CrossEntropyArguments {
  int64_t ignore_index;
  double label_smoothing, logit_scale;
  std::optional<double> logit_softcapping;
  double lse_square_scale = 0;

  CrossEntropyOptions checked(const char* op) const;
};

// One call, checked.
struct CrossEntropyCall {
  const char* op;  // its name for messages
  const at::Tensor &logits, &target;
  CrossEntropyOptions options;
  at::ScalarType accumulate;  // of losses and lse: fp64 for fp64 logits

  at::Tensor a_row() const { return empty({logits.sym_size(0)}, logits, accumulate); }  // [N]
  // The logits, copied unless a row is contiguous.
  at::Tensor contiguous_rows() const {
    return logits.size(1) == 1 || logits.stride(1) == 1 ? logits : logits.contiguous();
  }
};

// dloss and lse are there for a gradient. written: the gradient goes over the logits.
CrossEntropyCall check_cross_entropy(const char* op, const at::Tensor& logits,
                                     const at::Tensor& target, const CrossEntropyArguments& options,
                                     bool written, const at::Tensor* dloss = nullptr,
                                     const at::Tensor* lse = nullptr);

at::ScalarType accumulate_of(const at::Tensor& t);

// Where labels can be read at no cost: each is a class, or ignored.
void check_labels(const char* op, const at::Tensor& target, int64_t V, int64_t ignored);

// The operators as the dispatcher calls them, by their arguments one by one. A backend has
//   forward(call, loss, z_loss, lse), backward(call, dloss, lse, dlogits), with_grad(call, loss)
// where dlogits may be the logits, and with_grad writes it over them.
template <class Backend>
struct CrossEntropyOn {
  static CrossEntropyForwardOutputs fwd(const at::Tensor& logits, const at::Tensor& target,
                                        int64_t ignore_index, double label_smoothing,
                                        double logit_scale, std::optional<double> logit_softcapping,
                                        double lse_square_scale, bool) {
    const CrossEntropyCall call = check_cross_entropy(
        "cross_entropy", logits, target,
        {ignore_index, label_smoothing, logit_scale, logit_softcapping, lse_square_scale},
        /*written=*/false);
    const at::Tensor loss = call.a_row(), z_loss = call.a_row(), lse = call.a_row();
    Backend::forward(call, loss, z_loss, lse);
    return {loss, z_loss, lse};
  }

  static at::Tensor bwd(const at::Tensor& dloss, const at::Tensor& logits, const at::Tensor& target,
                        const at::Tensor& lse, int64_t ignore_index, double label_smoothing,
                        double logit_scale, std::optional<double> logit_softcapping,
                        double lse_square_scale) {
    const CrossEntropyCall call = check_cross_entropy(
        "cross_entropy_bwd", logits, target,
        {ignore_index, label_smoothing, logit_scale, logit_softcapping, lse_square_scale},
        /*written=*/false, &dloss, &lse);
    const at::Tensor dlogits = fresh(logits);
    Backend::backward(call, dloss, lse, dlogits);
    return dlogits;
  }

  static void bwd_over_logits(const at::Tensor& dloss, at::Tensor& logits, const at::Tensor& target,
                              const at::Tensor& lse, int64_t ignore_index, double label_smoothing,
                              double logit_scale, std::optional<double> logit_softcapping,
                              double lse_square_scale) {
    const CrossEntropyCall call = check_cross_entropy(
        "cross_entropy_bwd_", logits, target,
        {ignore_index, label_smoothing, logit_scale, logit_softcapping, lse_square_scale},
        /*written=*/true, &dloss, &lse);
    Backend::backward(call, dloss, lse, logits);
  }

  static at::Tensor with_grad(at::Tensor& logits, const at::Tensor& target, int64_t ignore_index,
                              double label_smoothing, double logit_scale,
                              std::optional<double> logit_softcapping, double lse_square_scale) {
    const CrossEntropyCall call = check_cross_entropy(
        "cross_entropy_with_grad_", logits, target,
        {ignore_index, label_smoothing, logit_scale, logit_softcapping, lse_square_scale},
        /*written=*/true);
    const at::Tensor loss = call.a_row();
    Backend::with_grad(call, loss);
    return loss;
  }

  static void register_in(torch::Library& m) {
    m.impl("cross_entropy_fwd", fwd);
    m.impl("cross_entropy_bwd", bwd);
    m.impl("cross_entropy_bwd_", bwd_over_logits);
    m.impl("cross_entropy_with_grad_", with_grad);
  }
};

}  // namespace gla_ext
