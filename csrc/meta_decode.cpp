// Shapes and dtypes of the outputs of a decoded token's operators, as meta.cpp has those of the
// others.
#include <torch/library.h>

#include "checks/decode.h"
#include "checks/recurrent_gla.h"
#include "dispatch/meta.h"

namespace gla_ext {
namespace {

at::Tensor of_width(at::Tensor const& x, const c10::SymInt& N, int64_t dropped = 1) {
  auto sizes = x.sym_sizes().vec();
  sizes.resize(sizes.size() - static_cast<size_t>(dropped));
  sizes.push_back(N);
  return empty(sizes, x, x.scalar_type());
}

std::vector<at::Tensor> norm_linear_meta(const at::Tensor& x, const OptionalTensor& norm_weight,
                                         double, at::TensorList weights, bool) {
  check_norm_linear(x, norm_weight, weights);
  std::vector<at::Tensor> results;
  for (const at::Tensor& weight : weights) results.push_back(of_width(x, weight.sym_size(0)));
  return results;
}

at::Tensor norm_swiglu_meta(const at::Tensor& x, const OptionalTensor& norm_weight, double,
                            const at::Tensor& gate_weight, const at::Tensor& up_weight, bool) {
  check_norm_swiglu(x, norm_weight, gate_weight, up_weight);
  return of_width(x, gate_weight.sym_size(0));
}

at::Tensor linear_residual_meta(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& residual, bool) {
  check_linear_residual(x, weight, residual);
  return of_width(x, weight.sym_size(0));
}

at::Tensor norm_gate_linear_residual_meta(const at::Tensor& o, const OptionalTensor& norm_weight,
                                          double, const at::Tensor& gate, const at::Tensor& weight,
                                          const at::Tensor& residual, bool) {
  check_norm_gate_linear_residual(o, norm_weight, gate, weight, residual);
  return of_width(o, weight.sym_size(0), /*dropped=*/2);
}

at::Tensor recurrent_gla_low_rank_step_meta(const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& v, const at::Tensor& h,
                                            const at::Tensor& gate_weight,
                                            const OptionalTensor& gate_bias, double normalizer,
                                            std::optional<double>, at::Tensor& state,
                                            const OptionalTensor& slots, std::optional<double>,
                                            bool state_v_first, bool) {
  const Shape shape = check_low_rank_step(q, k, v, h, gate_weight, gate_bias, normalizer, state,
                                          slots, state_v_first);
  return empty({shape.B, shape.T, shape.H, shape.V}, v, v.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl("norm_linear", norm_linear_meta);
  m.impl("norm_swiglu", norm_swiglu_meta);
  m.impl("linear_residual", linear_residual_meta);
  m.impl("norm_gate_linear_residual", norm_gate_linear_residual_meta);
  m.impl("recurrent_gla_low_rank_step_", recurrent_gla_low_rank_step_meta);
}

}  // namespace gla_ext
