#include "decode.h"

#include <string>

#include "dispatch/linear_map.h"
#include "recurrent_gla.h"

namespace gla_ext {

void check_norm_linear(const at::Tensor& x, const OptionalTensor& norm_weight,
                       at::TensorList weights) {
  const char* op = "norm_linear";
  const Checker check(op, "x", x);
  check_first(op, check, "x", x, 1, "[..., D]");
  const c10::SymInt D = x.sym_size(-1);
  check_norm_weight(check, norm_weight, D, "[D]");
  TORCH_CHECK_VALUE(!weights.empty(), op, ": expected at least 1 weight, got none");
  for (size_t i = 0; i < weights.size(); ++i)
    check_map(check, c10::str("weights[", i, "]").c_str(), weights[i], x, D);
}

void check_norm_swiglu(const at::Tensor& x, const OptionalTensor& norm_weight,
                       const at::Tensor& gate_weight, const at::Tensor& up_weight) {
  const char* op = "norm_swiglu";
  const Checker check(op, "x", x);
  check_first(op, check, "x", x, 1, "[..., D]");
  const c10::SymInt D = x.sym_size(-1);
  check_norm_weight(check, norm_weight, D, "[D]");
  const c10::SymInt N = check_map(check, "gate_weight", gate_weight, x, D);
  check_like(check, "up_weight", up_weight, x);
  check.shape("up_weight", up_weight, "[N, D]", {N, D});
}

void check_linear_residual(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& residual) {
  const char* op = "linear_residual";
  const Checker check(op, "x", x);
  check_first(op, check, "x", x, 1, "[..., D]");
  Sizes sizes = x.sym_sizes().vec();
  sizes.back() = check_map(check, "weight", weight, x, x.sym_size(-1));
  check_like(check, "residual", residual, x);
  check.shape("residual", residual, "[..., N]", sizes);
}

void check_norm_gate_linear_residual(const at::Tensor& o, const OptionalTensor& norm_weight,
                                     const at::Tensor& gate, const at::Tensor& weight,
                                     const at::Tensor& residual) {
  const char* op = "norm_gate_linear_residual";
  const Sizes sizes = check_norm_gate_map(op, o, norm_weight, gate, weight);
  const Checker check(op, "o", o);
  check_like(check, "residual", residual, o);
  check.shape("residual", residual, "[..., N]", sizes);
}

Shape check_low_rank_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& h, const at::Tensor& gate_weight,
                          const OptionalTensor& gate_bias, double normalizer,
                          const at::Tensor& state, const OptionalTensor& slots,
                          bool state_v_first) {
  const char* op = "recurrent_gla_low_rank_step_";
  const OptionalTensor none;
  const Shape shape = check_pool({op, &q, &k, &v, &none, &none}, {state, slots, state_v_first});
  const Checker check(op, "q", q);
  TORCH_CHECK_VALUE(holds(shape.T.sym_eq(1)), op, ": expected one token a row, got T = ", shape.T);
  check_like(check, "h", h, q);
  check.rank("h", h, 3, "[B, 1, R]");
  check.shape("h", h, "[B, 1, R]", {shape.B, shape.T, h.sym_size(2)});
  check.at_least_one("the last dimension", "h", h.sym_size(2));
  const c10::SymInt keys = k.sym_size(2) * shape.K;
  check_like(check, "gate_weight", gate_weight, q);
  check.shape("gate_weight", gate_weight, "[HK * K, R]", {keys, h.sym_size(2)});
  if (given(gate_bias)) {
    check_like(check, "gate_bias", *gate_bias, q);
    check.shape("gate_bias", *gate_bias, "[HK * K]", {keys});
  }
  TORCH_CHECK_VALUE(normalizer > 0, op, ": expected normalizer to be above 0, got ", normalizer);
  return shape;
}

}  // namespace gla_ext
