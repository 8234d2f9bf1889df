// A decoded token's linear maps: norm, gate, SwiGLU and residual in one operator each.
#include "op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>

#include "dispatch/linear_map.h"
#include "dispatch/meta.h"
#include "dispatch/refuse.h"
#include "dispatch/schema.h"
#include "ops.h"

namespace gla_ext {

// What they take.
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

namespace composed {
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

}  // namespace composed

namespace {

// What they return while a graph is traced.
at::Tensor of_width(const at::Tensor& x, const c10::SymInt& N, int64_t dropped = 1) {
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

void without_grad(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_gradients(op, *stack, "decoding has no gradient, run it under torch.no_grad()");
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

}  // namespace

// overlaps: the kernel may start before the one before it on the stream has ended, and read
// weights; nothing that may still run writes them.
TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "norm_linear(Tensor x, Tensor? norm_weight, float eps, Tensor[] weights, bool "
         "overlaps=False) -> Tensor[]");
  define(m,
         "norm_swiglu(Tensor x, Tensor? norm_weight, float eps, Tensor gate_weight, Tensor "
         "up_weight, bool overlaps=False) -> Tensor");
  define(
      m,
      "linear_residual(Tensor x, Tensor weight, Tensor residual, bool overlaps=False) -> Tensor");
  define(m,
         "norm_gate_linear_residual(Tensor o, Tensor? norm_weight, float eps, Tensor gate, Tensor "
         "weight, Tensor residual, bool overlaps=False) -> Tensor");
  refuse_vmap(m, {"norm_linear", "norm_swiglu", "linear_residual", "norm_gate_linear_residual"});
}

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("norm_linear", composed::norm_linear);
  m.impl("norm_swiglu", composed::norm_swiglu);
  m.impl("linear_residual", composed::linear_residual);
  m.impl("norm_gate_linear_residual", composed::norm_gate_linear_residual);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl("norm_linear", norm_linear_meta);
  m.impl("norm_swiglu", norm_swiglu_meta);
  m.impl("linear_residual", linear_residual_meta);
  m.impl("norm_gate_linear_residual", norm_gate_linear_residual_meta);
}

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  for (const char* op :
       {"norm_linear", "norm_swiglu", "linear_residual", "norm_gate_linear_residual"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&without_grad>());
}

}  // namespace gla_ext
