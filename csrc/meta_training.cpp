// Shapes and dtypes of the outputs of a training step's operators around attention, as meta.cpp has
// those of the others.
#include <torch/library.h>

#include "checks/cross_entropy.h"
#include "dispatch/meta.h"
#include "ops.h"

namespace gla_ext {
namespace {

CrossEntropyForwardOutputs cross_entropy_fwd_meta(const at::Tensor& logits,
                                                  const at::Tensor& target, int64_t ignore_index,
                                                  double label_smoothing, double logit_scale,
                                                  std::optional<double> logit_softcapping,
                                                  double lse_square_scale, bool) {
  const CrossEntropyCall call =
      check_cross_entropy_fwd(logits, target, ignore_index, label_smoothing, logit_scale,
                              logit_softcapping, lse_square_scale);
  const auto a_row = [&] { return empty({call.N}, logits, call.accumulate); };
  return {a_row(), a_row(), a_row()};
}

at::Tensor cross_entropy_bwd_meta(const at::Tensor& dloss, const at::Tensor& logits,
                                  const at::Tensor& target, const at::Tensor& lse,
                                  int64_t ignore_index, double label_smoothing, double logit_scale,
                                  std::optional<double> logit_softcapping,
                                  double lse_square_scale) {
  check_cross_entropy_bwd(dloss, logits, target, lse, ignore_index, label_smoothing, logit_scale,
                          logit_softcapping, lse_square_scale);
  return fresh(logits);
}

void cross_entropy_bwd_over_logits_meta(const at::Tensor& dloss, at::Tensor& logits,
                                        const at::Tensor& target, const at::Tensor& lse,
                                        int64_t ignore_index, double label_smoothing,
                                        double logit_scale, std::optional<double> logit_softcapping,
                                        double lse_square_scale) {
  check_cross_entropy_bwd(dloss, logits, target, lse, ignore_index, label_smoothing, logit_scale,
                          logit_softcapping, lse_square_scale);
  check_writable_rows("cross_entropy_bwd_", logits);
}

at::Tensor cross_entropy_with_grad_meta(at::Tensor& logits, const at::Tensor& target,
                                        int64_t ignore_index, double label_smoothing,
                                        double logit_scale, std::optional<double> logit_softcapping,
                                        double lse_square_scale) {
  const CrossEntropyCall call =
      check_cross_entropy_fwd(logits, target, ignore_index, label_smoothing, logit_scale,
                              logit_softcapping, lse_square_scale);
  check_writable_rows("cross_entropy_with_grad_", logits);
  return empty({call.N}, logits, call.accumulate);
}

LinearCrossEntropyOutputs linear_cross_entropy_fwd_meta(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  const CrossEntropyCall call =
      check_linear_cross_entropy(x, weight, bias, target, ignore_index, label_smoothing,
                                 logit_scale, logit_softcapping, num_chunks);
  const at::ScalarType wide = call.accumulate;
  return {empty({}, x, wide), with_dx ? fresh(x) : empty({0}, x, x.scalar_type()),
          with_dweight ? empty(weight.sym_sizes(), x, wide) : empty({0}, x, wide),
          with_dweight && given(bias) ? empty(bias->sym_sizes(), x, wide) : empty({0}, x, wide)};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl("cross_entropy_fwd", cross_entropy_fwd_meta);
  m.impl("cross_entropy_bwd", cross_entropy_bwd_meta);
  m.impl("cross_entropy_bwd_", cross_entropy_bwd_over_logits_meta);
  m.impl("cross_entropy_with_grad_", cross_entropy_with_grad_meta);
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_meta);
}

}  // namespace gla_ext
