// A decoded token's linear maps: norm, gate, SwiGLU and residual in one operator each.
#include "op.h"

#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>

#include "dispatch/in_place.h"
#include "dispatch/linear_map.h"
#include "dispatch/meta.h"
#include "ops.h"

namespace gla_ext {

// Checks of the operators' arguments.
void check(const NormLinear& a) {
  const char* op = "norm_linear";
  const Checker check(op, "x", a.x);
  check_first(op, check, "x", a.x, 1, "[..., D]");
  const c10::SymInt D = a.x.sym_size(-1);
  check_norm_weight(check, a.norm_weight, D, "[D]");
  TORCH_CHECK_VALUE(!a.weights.empty(), op, ": expected at least 1 weight, got none");
  for (size_t i = 0; i < a.weights.size(); ++i)
    check_map(check, c10::str("weights[", i, "]").c_str(), a.weights[i], D);
}

void check(const NormSwiglu& a) {
  const char* op = "norm_swiglu";
  const Checker check(op, "x", a.x);
  check_first(op, check, "x", a.x, 1, "[..., D]");
  const c10::SymInt D = a.x.sym_size(-1);
  check_norm_weight(check, a.norm_weight, D, "[D]");
  const c10::SymInt N = check_map(check, "gate_weight", a.gate_weight, D);
  check.like("up_weight", a.up_weight);
  check.shape("up_weight", a.up_weight, "[N, D]", {N, D});
}

void check(const LinearResidual& a) {
  const char* op = "linear_residual";
  const Checker check(op, "x", a.x);
  check_first(op, check, "x", a.x, 1, "[..., D]");
  Sizes sizes = a.x.sym_sizes().vec();
  sizes.back() = check_map(check, "weight", a.weight, a.x.sym_size(-1));
  check.like("residual", a.residual);
  check.shape("residual", a.residual, "[..., N]", sizes);
}

void check(const NormGateLinearResidual& a) {
  const char* op = "norm_gate_linear_residual";
  const Sizes sizes = check_norm_gate_map(op, a.o, a.norm_weight, a.gate, a.weight);
  const Checker check(op, "o", a.o);
  check.like("residual", a.residual);
  check.shape("residual", a.residual, "[..., N]", sizes);
}

namespace {

at::Tensor norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                const OptionalTensor& gate = {}) {
  return std::get<0>(rms_norm_gate_fwd(x, weight, gate, "swish", eps));
}

}  // namespace

std::vector<at::Tensor> composed(const NormLinear& a) {
  const at::Tensor y = norm(a.x, a.norm_weight, a.eps);
  std::vector<at::Tensor> results;
  for (const at::Tensor& weight : a.weights) results.push_back(at::linear(y, weight));
  return results;
}

at::Tensor composed(const NormSwiglu& a) {
  const at::Tensor y = norm(a.x, a.norm_weight, a.eps);
  return swiglu_fwd(at::linear(y, a.gate_weight), at::linear(y, a.up_weight));
}

at::Tensor composed(const LinearResidual& a) {
  return at::add(a.residual, at::linear(a.x, a.weight));
}

at::Tensor composed(const NormGateLinearResidual& a) {
  const at::Tensor gate = a.gate.unflatten(-1, {a.o.size(-2), a.o.size(-1)});
  const at::Tensor y = norm(a.o, a.norm_weight, a.eps, gate).flatten(-2);
  return at::add(a.residual, at::linear(y, a.weight));
}

namespace {

struct Composed {
  template <class Arguments>
  static auto run(const Arguments& a) {
    return composed(a);
  }
};

// Results of the operators while a graph is traced.
struct Traced {
  static at::Tensor of_width(const at::Tensor& x, const c10::SymInt& N, int64_t dropped = 1) {
    auto sizes = x.sym_sizes().vec();
    sizes.resize(sizes.size() - static_cast<size_t>(dropped));
    sizes.push_back(N);
    return empty(sizes, x, x.scalar_type());
  }
  static std::vector<at::Tensor> run(const NormLinear& a) {
    std::vector<at::Tensor> results;
    for (const at::Tensor& weight : a.weights) results.push_back(of_width(a.x, weight.sym_size(0)));
    return results;
  }
  static at::Tensor run(const NormSwiglu& a) { return of_width(a.x, a.gate_weight.sym_size(0)); }
  static at::Tensor run(const LinearResidual& a) { return of_width(a.x, a.weight.sym_size(0)); }
  static at::Tensor run(const NormGateLinearResidual& a) {
    return of_width(a.o, a.weight.sym_size(0), /*dropped=*/2);
  }
};

constexpr char kInstead[] = "decoding has no gradient, run it under torch.no_grad()";

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define_without_gradient<kInstead>(
      m,
      "norm_linear(Tensor x, Tensor? norm_weight, float eps, Tensor[] weights, bool "
      "overlaps=False) -> Tensor[]");
  define_without_gradient<kInstead>(
      m,
      "norm_swiglu(Tensor x, Tensor? norm_weight, float eps, Tensor gate_weight, Tensor "
      "up_weight, bool overlaps=False) -> Tensor");
  define_without_gradient<kInstead>(
      m,
      "linear_residual(Tensor x, Tensor weight, Tensor residual, bool overlaps=False) -> Tensor");
  define_without_gradient<kInstead>(
      m,
      "norm_gate_linear_residual(Tensor o, Tensor? norm_weight, float eps, Tensor gate, Tensor "
      "weight, Tensor residual, bool overlaps=False) -> Tensor");
  refuse_vmap(m, {"norm_linear", "norm_swiglu", "linear_residual", "norm_gate_linear_residual"});
}

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) { register_decode<Composed>(m); }

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { register_decode<Traced>(m); }

}  // namespace gla_ext
