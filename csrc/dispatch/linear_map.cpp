#include "linear_map.h"

namespace gla_ext {

at::Tensor as_matrix(const at::Tensor& t) {
  c10::SymInt rows = 1;
  for (const c10::SymInt& size : t.sym_sizes().slice(0, t.dim() - 1)) rows *= size;
  return t.reshape_symint({rows, t.sym_size(-1)});
}

void check_first(const char* op, const Checker& check, const char* name, const at::Tensor& t,
                 int64_t rank, const char* dims) {
  check.strided(name, t);
  check.floating(name, t);
  TORCH_CHECK_VALUE(t.dim() >= rank, op, ": expected ", name, " to have at least ", rank,
                    " dimension", rank == 1 ? "" : "s", " ", dims, ", got ", t.dim());
  check.at_least_one("the last dimension", name, t.sym_size(-1));
}

c10::SymInt check_map(const Checker& check, const char* name, const at::Tensor& weight,
                      const c10::SymInt& D) {
  check.like(name, weight);
  check.rank(name, weight, 2, "[N, D]");
  check.shape(name, weight, "[N, D]", {weight.sym_size(0), D});
  check.at_least_one("the first dimension", name, weight.sym_size(0));
  return weight.sym_size(0);
}

void check_norm_weight(const Checker& check, const OptionalTensor& weight, const c10::SymInt& size,
                       const char* dims) {
  if (!given(weight)) return;
  check.placed("norm_weight", *weight);
  check.floating("norm_weight", *weight);
  check.shape("norm_weight", *weight, dims, {size});
}

Sizes check_norm_gate_map(const char* op, const at::Tensor& o, const OptionalTensor& norm_weight,
                          const at::Tensor& gate, const at::Tensor& weight) {
  const Checker check(op, "o", o);
  check_first(op, check, "o", o, 2, "[..., H, V]");
  const c10::SymInt V = o.sym_size(-1), D = o.sym_size(-2) * V;
  check_norm_weight(check, norm_weight, V, "[V]");
  Sizes sizes = o.sym_sizes().vec();
  sizes.pop_back();
  sizes.back() = D;
  check.like("gate", gate);
  check.shape("gate", gate, "[..., H * V]", sizes);
  sizes.back() = check_map(check, "weight", weight, D);
  return sizes;
}

}  // namespace gla_ext
