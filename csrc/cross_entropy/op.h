// Cross entropy: the operators' inputs, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include "common/cross_entropy.h"
#include "common/shape.h"
#include "dispatch/arguments.h"
#include "dispatch/meta.h"
#include "ops.h"

namespace gla_ext {

// The options as operators take them.
struct LossOptions {
  int64_t ignore_index;
  double label_smoothing, logit_scale;
  std::optional<double> logit_softcapping;
};
struct CrossEntropyArguments : LossOptions {
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

// dloss and lse are given for a gradient. written: the gradient is written over the logits.
CrossEntropyCall check_cross_entropy(const char* op, const at::Tensor& logits,
                                     const at::Tensor& target, const CrossEntropyArguments& options,
                                     bool written, const at::Tensor* dloss = nullptr,
                                     const at::Tensor* lse = nullptr);

// Used where labels can be read at no cost. Checks that each is a class, or ignored.
void check_labels(const char* op, const at::Tensor& target, int64_t V, int64_t ignored);

// The arguments, described in ops.h.
struct CrossEntropyForward {
  const at::Tensor &logits, &target;
  CrossEntropyArguments options;
  bool inplace_backward;
};
struct CrossEntropyBackward {
  const at::Tensor &dloss, &logits, &target, &lse;
  CrossEntropyArguments options;
};
struct CrossEntropyWithGrad {
  const at::Tensor &logits, &target;
  CrossEntropyArguments options;
};

// Makes the operators from a backend, which has
//   forward(call, loss, z_loss, lse), backward(call, dloss, lse, dlogits), with_grad(call, loss)
// where dlogits may be the logits, and with_grad writes it over them.
template <class Backend>
struct CrossEntropyOn {
  static CrossEntropyForwardOutputs fwd(const CrossEntropyForward& a) {
    const CrossEntropyCall call =
        check_cross_entropy("cross_entropy", a.logits, a.target, a.options, /*written=*/false);
    const at::Tensor loss = call.a_row(), z_loss = call.a_row(), lse = call.a_row();
    Backend::forward(call, loss, z_loss, lse);
    return {loss, z_loss, lse};
  }

  static at::Tensor bwd(const CrossEntropyBackward& a) {
    const CrossEntropyCall call = check_cross_entropy(
        "cross_entropy_bwd", a.logits, a.target, a.options, /*written=*/false, &a.dloss, &a.lse);
    const at::Tensor dlogits = fresh(a.logits);
    Backend::backward(call, a.dloss, a.lse, dlogits);
    return dlogits;
  }

  static void bwd_over_logits(const CrossEntropyBackward& a) {
    const CrossEntropyCall call = check_cross_entropy(
        "cross_entropy_bwd_", a.logits, a.target, a.options, /*written=*/true, &a.dloss, &a.lse);
    Backend::backward(call, a.dloss, a.lse, a.logits);
  }

  static at::Tensor with_grad(const CrossEntropyWithGrad& a) {
    const CrossEntropyCall call = check_cross_entropy("cross_entropy_with_grad_", a.logits,
                                                      a.target, a.options, /*written=*/true);
    const at::Tensor loss = call.a_row();
    Backend::with_grad(call, loss);
    return loss;
  }

  static void register_in(torch::Library& m) {
    m.impl("cross_entropy_fwd", by_arguments<cross_entropy_fwd, fwd>);
    m.impl("cross_entropy_bwd", by_arguments<cross_entropy_bwd, bwd>);
    m.impl("cross_entropy_bwd_", by_arguments<cross_entropy_bwd_, bwd_over_logits>);
    m.impl("cross_entropy_with_grad_", by_arguments<cross_entropy_with_grad_, with_grad>);
  }
};

}  // namespace gla_ext
