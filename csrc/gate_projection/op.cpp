// The gate's projection.
#include "op.h"

#include "dispatch/autocast.h"
#include "dispatch/checker.h"
#include "dispatch/differentiable.h"
#include "dispatch/linear_map.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"
#include "ops.h"

namespace gla_ext {

at::Tensor gate_projection_fwd(const at::Tensor& h, const at::Tensor& weight,
                               const OptionalTensor& bias, double normalizer,
                               std::optional<double> clamp_min) {
  static const Op<decltype(gate_projection_fwd)> op("gla_ext::gate_projection_fwd");
  return op(h, weight, bias, normalizer, clamp_min);
}

GateProjectionBackwardOutputs gate_projection_bwd(const at::Tensor& dg, const at::Tensor& h,
                                                  const at::Tensor& weight,
                                                  const OptionalTensor& bias, double normalizer,
                                                  std::optional<double> clamp_min) {
  static const Op<decltype(gate_projection_bwd)> op("gla_ext::gate_projection_bwd");
  return op(dg, h, weight, bias, normalizer, clamp_min);
}

// What they take.
namespace {

void check_inputs(const char* op, const at::Tensor& h, const at::Tensor& weight,
                  const OptionalTensor& bias, double normalizer) {
  const Checker check(op, "h", h);
  check.strided("h", h);
  check.floating("h", h);
  check_like(check, "weight", weight, h);
  if (given(bias)) check_like(check, "bias", *bias, h);
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
  check_like(check, "dg", dg, h);
  Sizes sizes = h.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  check.shape("dg", dg, "[..., K]", sizes);
}

namespace {

// What they return while a graph is traced.
at::Tensor fwd_meta(const at::Tensor& h, const at::Tensor& weight, const OptionalTensor& bias,
                    double normalizer, std::optional<double>) {
  check_gate_projection_fwd(h, weight, bias, normalizer);
  auto sizes = h.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return empty(sizes, h, h.scalar_type());
}

GateProjectionBackwardOutputs bwd_meta(const at::Tensor& dg, const at::Tensor& h,
                                       const at::Tensor& weight, const OptionalTensor& bias,
                                       double normalizer, std::optional<double>) {
  check_gate_projection_bwd(dg, h, weight, bias, normalizer);
  return {fresh(h), fresh(weight), given(bias) ? fresh(*bias) : empty({0}, h, h.scalar_type())};
}

// h and the parameters are saved, z is made again in backward.
struct GateProjection {
  static constexpr const char *fwd = "gate_projection_fwd", *bwd = "gate_projection_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&, const at::Tensor& h,
                              const at::Tensor& weight, const OptionalTensor& bias,
                              double normalizer, std::optional<double> clamp_min) {
    save(ctx, {h, weight, bias});
    ctx->saved_data["normalizer"] = normalizer;
    ctx->saved_data["clamp_min"] = clamp_min;
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dh, dweight, dbias] = gate_projection_bwd(
        grads[0], saved[0], saved[1], or_absent(saved[2]), ctx->saved_data["normalizer"].toDouble(),
        ctx->saved_data["clamp_min"].toOptional<double>());
    return {dh, dweight, saved[2].defined() ? dbias : at::Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "gate_projection_fwd(Tensor h, Tensor weight, Tensor? bias, float normalizer, float? "
         "clamp_min) -> Tensor");
  define(m,
         "gate_projection_bwd(Tensor dg, Tensor h, Tensor weight, Tensor? bias, float normalizer, "
         "float? clamp_min) -> (Tensor dh, Tensor dweight, Tensor dbias)");
  autocast_first<3, gate_projection_fwd>(m, GateProjection::fwd);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl(GateProjection::fwd, fwd_meta);
  m.impl(GateProjection::bwd, bwd_meta);
}

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(GateProjection::fwd, Differentiable<gate_projection_fwd, GateProjection>::run);
  m.impl(GateProjection::bwd, DifferentiableOnce<gate_projection_bwd, GateProjection>::run);
}

}  // namespace gla_ext
