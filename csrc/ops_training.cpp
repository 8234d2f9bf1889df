// The entry points of the operators of a training step around attention; see ops.cpp for schemas.

#include "dispatch/op.h"
#include "ops.h"

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

LinearCrossEntropyOutputs linear_cross_entropy_fwd(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  static const Op<decltype(linear_cross_entropy_fwd)> op("gla_ext::linear_cross_entropy_fwd");
  return op(x, weight, bias, target, ignore_index, label_smoothing, logit_scale, logit_softcapping,
            num_chunks, with_dx, with_dweight);
}

}  // namespace gla_ext
