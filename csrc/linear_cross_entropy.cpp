// Cross entropy of a linear map of x, some rows at a time, with the gradients of the sum in the
// same pass: products are torch's, so that this is the same on every device.
//
//   logits = x_c Wᵀ + b      loss += Σ cross_entropy(logits)      logits <- d loss / d logits
//   dx_c = dlogits W         dW += dlogitsᵀ x_c                   db += Σ dlogits
//
// dW and db are summed in fp32 (fp64 for fp64 inputs).
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "checks/cross_entropy.h"
#include "ops.h"

namespace gla_ext {
namespace {

// As many rows as make num_chunks parts of x, in fewer where logits are not much wider than x.
int64_t rows_of_chunk(int64_t N, int64_t D, int64_t V, int64_t num_chunks) {
  const int64_t chunks = std::min(num_chunks, (V + D - 1) / std::max<int64_t>(D, 1));
  return std::max<int64_t>(1, (N + chunks - 1) / chunks);
}

// sum += aᵀ b in the dtype of sum, which may be fp32 of shorter a and b.
void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == sum.scalar_type())
    at::addmm_out(sum, sum, a.t(), b);
  else if (a.is_cuda())
    at::addmm_out(sum, sum, a.t(), b, sum.scalar_type());
  else  // torch has no such product on other devices
    at::addmm_out(sum, sum, a.t().to(sum.scalar_type()), b.to(sum.scalar_type()));
}

LinearCrossEntropyOutputs linear_cross_entropy_fwd_kernel(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  const CrossEntropyCall call =
      check_linear_cross_entropy(x, weight, bias, target, ignore_index, label_smoothing,
                                 logit_scale, logit_softcapping, num_chunks);
  const int64_t N = x.size(0), D = x.size(1), V = weight.size(0);
  if (x.is_cpu()) check_labels("linear_cross_entropy", target, V, ignore_index);
  const auto wide = x.options().dtype(call.accumulate);
  at::Tensor loss = at::zeros({}, wide);
  at::Tensor dx = with_dx ? at::empty({N, D}, x.options()) : at::empty({0}, x.options());
  at::Tensor dweight = with_dweight ? at::zeros({V, D}, wide) : at::empty({0}, wide);
  at::Tensor dbias = with_dweight && given(bias) ? at::zeros({V}, wide) : at::empty({0}, wide);
  const int64_t rows = rows_of_chunk(N, D, V, num_chunks);
  for (int64_t first = 0; first < N; first += rows) {
    const int64_t count = std::min(rows, N - first);
    const at::Tensor part = x.narrow(0, first, count);
    const at::Tensor labels = target.narrow(0, first, count);
    at::Tensor logits = at::linear(part, weight, bias);
    if (!with_dx && !with_dweight) {
      loss += std::get<0>(cross_entropy_fwd(logits, labels, ignore_index, label_smoothing,
                                            logit_scale, logit_softcapping, 0, false))
                  .sum();
      continue;
    }
    loss += cross_entropy_with_grad_(logits, labels, ignore_index, label_smoothing, logit_scale,
                                     logit_softcapping, 0)
                .sum();
    if (with_dx) {
      at::Tensor of_part = dx.narrow(0, first, count);
      at::mm_out(of_part, logits, weight);
    }
    if (with_dweight) add_product(dweight, logits, part);
    if (dbias.numel() > 0) dbias += logits.sum(0, /*keepdim=*/false, call.accumulate);
  }
  return {loss, dx, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_kernel);
}
TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_kernel);
}

}  // namespace gla_ext
