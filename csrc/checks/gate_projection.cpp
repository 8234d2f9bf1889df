#include "gate_projection.h"

#include "dispatch/checker.h"

namespace gla_ext {
namespace {

void check_inputs(const char* op, const at::Tensor& h, const at::Tensor& weight,
                  const OptionalTensor& bias, double normalizer) {
  const Checker check(op, "h", h);
  std::vector<std::pair<const char*, const at::Tensor*>> parameters{{"weight", &weight}};
  if (given(bias)) parameters.push_back({"bias", &*bias});
  check.strided("h", h);
  check.floating("h", h);
  for (const auto& [name, t] : parameters) {
    check.defined(name, *t);
    check.strided(name, *t);
    check.device(name, *t);
    check.like_first(name, *t, h.scalar_type());
  }
  TORCH_CHECK_VALUE(h.dim() >= 1, op, ": expected h to have at least 1 dimension [..., R], got 0");
  check.at_least_one("the last dimension", "h", h.sym_size(-1));
  check.rank("weight", weight, 2, "[K, R]");
  const c10::SymInt K = weight.sym_size(0);
  check.shape("weight", weight, "[K, R]", {K, h.sym_size(-1)});
  check.at_least_one("the first dimension", "weight", K);
  if (given(bias)) check.shape("bias", *bias, "[K]", {K});
  TORCH_CHECK_VALUE(normalizer > 0, op, ": expected normalizer to be above 0, got ", normalizer);
}

}  // namespace

void check_gate_projection_fwd(const at::Tensor& h, const at::Tensor& weight,
                               const OptionalTensor& bias, double normalizer) {
  check_inputs("gate_projection", h, weight, bias, normalizer);
}

void check_gate_projection_bwd(const at::Tensor& dg, const at::Tensor& h, const at::Tensor& weight,
                               const OptionalTensor& bias, double normalizer) {
  const char* op = "gate_projection_bwd";
  check_inputs(op, h, weight, bias, normalizer);
  const Checker check(op, "h", h);
  check.defined("dg", dg);
  check.strided("dg", dg);
  check.device("dg", dg);
  check.like_first("dg", dg, h.scalar_type());
  Sizes sizes = h.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  check.shape("dg", dg, "[..., K]", sizes);
}

}  // namespace gla_ext
