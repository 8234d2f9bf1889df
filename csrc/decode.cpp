#include "decode.h"

#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include "checks/decode.h"
#include "ops.h"

namespace gla_ext::composed {
namespace {

at::Tensor norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                const OptionalTensor& gate = {}) {
  return std::get<0>(rms_norm_gate_fwd(x, weight, gate, "swish", eps));
}

}  // namespace

std::vector<at::Tensor> norm_linear(const at::Tensor& x, const OptionalTensor& norm_weight,
                                    double eps, at::TensorList weights, bool) {
  check_norm_linear(x, norm_weight, weights);
  const at::Tensor y = norm(x, norm_weight, eps);
  std::vector<at::Tensor> results;
  for (const at::Tensor& weight : weights) results.push_back(at::linear(y, weight));
  return results;
}

at::Tensor norm_swiglu(const at::Tensor& x, const OptionalTensor& norm_weight, double eps,
                       const at::Tensor& gate_weight, const at::Tensor& up_weight, bool) {
  check_norm_swiglu(x, norm_weight, gate_weight, up_weight);
  const at::Tensor y = norm(x, norm_weight, eps);
  return swiglu_fwd(at::linear(y, gate_weight), at::linear(y, up_weight));
}

at::Tensor linear_residual(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& residual, bool) {
  check_linear_residual(x, weight, residual);
  return at::add(residual, at::linear(x, weight));
}

at::Tensor norm_gate_linear_residual(const at::Tensor& o, const OptionalTensor& norm_weight,
                                     double eps, const at::Tensor& gate, const at::Tensor& weight,
                                     const at::Tensor& residual, bool) {
  check_norm_gate_linear_residual(o, norm_weight, gate, weight, residual);
  const at::Tensor y =
      norm(o, norm_weight, eps, gate.unflatten(-1, {o.size(-2), o.size(-1)})).flatten(-2);
  return at::add(residual, at::linear(y, weight));
}

at::Tensor recurrent_gla_low_rank_step_(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const at::Tensor& h,
                                        const at::Tensor& gate_weight,
                                        const OptionalTensor& gate_bias, double normalizer,
                                        std::optional<double> clamp_min, at::Tensor& state,
                                        const OptionalTensor& slots, std::optional<double> scale,
                                        bool state_v_first, bool) {
  check_low_rank_step(q, k, v, h, gate_weight, gate_bias, normalizer, state, slots, state_v_first);
  const at::Tensor gk = gate_projection_fwd(h, gate_weight, gate_bias, normalizer, clamp_min)
                            .unflatten(-1, {k.size(2), k.size(3)});
  return gla_ext::recurrent_gla_step_(q, k, v, gk, {}, state, slots, scale, state_v_first);
}

}  // namespace gla_ext::composed

namespace gla_ext {

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("norm_linear", composed::norm_linear);
  m.impl("norm_swiglu", composed::norm_swiglu);
  m.impl("linear_residual", composed::linear_residual);
  m.impl("norm_gate_linear_residual", composed::norm_gate_linear_residual);
  m.impl("recurrent_gla_low_rank_step_", composed::recurrent_gla_low_rank_step_);
}

}  // namespace gla_ext
