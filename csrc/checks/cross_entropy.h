// The input contract of cross entropy, once, for every backend and for tracing.
#pragma once

#include "common/cross_entropy.h"
#include "common/shape.h"

namespace gla_ext {

// What every backend needs to know of a call.
struct CrossEntropyCall {
  c10::SymInt N, V;
  at::ScalarType accumulate = at::kFloat;  // of losses and lse: fp64 for fp64 logits
  CrossEntropyOptions options;
};

CrossEntropyCall check_cross_entropy_fwd(const at::Tensor& logits, const at::Tensor& target,
                                         int64_t ignore_index, double label_smoothing,
                                         double logit_scale,
                                         std::optional<double> logit_softcapping,
                                         double lse_square_scale);

CrossEntropyCall check_cross_entropy_bwd(const at::Tensor& dloss, const at::Tensor& logits,
                                         const at::Tensor& target, const at::Tensor& lse,
                                         int64_t ignore_index, double label_smoothing,
                                         double logit_scale,
                                         std::optional<double> logit_softcapping,
                                         double lse_square_scale);

// For what writes over the logits.
void check_writable_rows(const char* op, const at::Tensor& logits);

// Where labels can be read at no cost: each is a class, or ignored.
void check_labels(const char* op, const at::Tensor& target, int64_t V, int64_t ignored);

CrossEntropyCall check_linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight,
                                            const OptionalTensor& bias, const at::Tensor& target,
                                            int64_t ignore_index, double label_smoothing,
                                            double logit_scale,
                                            std::optional<double> logit_softcapping,
                                            int64_t num_chunks);

}  // namespace gla_ext
