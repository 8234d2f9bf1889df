// The gate's projection.
#include "op.h"

#include "dispatch/autocast.h"
#include "dispatch/checker.h"
#include "dispatch/differentiable.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"

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

// Checks of the operators' arguments.
namespace {

template <class Arguments>
void check_inputs(const char* op, const Checker& check, const Arguments& a) {
  check.strided("h", a.h);
  check.floating("h", a.h);
  check.like("weight", a.weight);
  if (given(a.bias)) check.like("bias", *a.bias);
  TORCH_CHECK_VALUE(a.h.dim() >= 1, op,
                    ": expected h to have at least 1 dimension [..., R], got 0");
  check.at_least_one("the last dimension", "h", a.h.sym_size(-1));
  check.rank("weight", a.weight, 2, "[K, R]");
  const c10::SymInt K = a.weight.sym_size(0);
  check.shape("weight", a.weight, "[K, R]", {K, a.h.sym_size(-1)});
  check.at_least_one("the first dimension", "weight", K);
  if (given(a.bias)) check.shape("bias", *a.bias, "[K]", {K});
  TORCH_CHECK_VALUE(a.normalizer > 0, op, ": expected normalizer to be above 0, got ",
                    a.normalizer);
}

// [..., K]
Sizes sizes_of_gates(const at::Tensor& h, const at::Tensor& weight) {
  Sizes sizes = h.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return sizes;
}

}  // namespace

void check_gate_projection(const GateForward& a) {
  check_inputs("gate_projection", Checker("gate_projection", "h", a.h), a);
}

void check_gate_projection(const GateBackward& a) {
  const char* op = "gate_projection_bwd";
  const Checker check(op, "h", a.h);
  check_inputs(op, check, a);
  check.like("dg", a.dg);
  check.shape("dg", a.dg, "[..., K]", sizes_of_gates(a.h, a.weight));
}

at::Tensor fresh_gates(const GateForward& a) {
  return empty(sizes_of_gates(a.h, a.weight), a.h, a.h.scalar_type());
}

GateProjectionBackwardOutputs fresh_gradients(const GateBackward& a) {
  return {fresh(a.h), fresh(a.weight),
          given(a.bias) ? fresh(*a.bias) : empty({0}, a.h, a.h.scalar_type())};
}

namespace {

at::Tensor fwd_meta(const GateForward& a) {
  check_gate_projection(a);
  return fresh_gates(a);
}

GateProjectionBackwardOutputs bwd_meta(const GateBackward& a) {
  check_gate_projection(a);
  return fresh_gradients(a);
}

// Saves h and the parameters; backward computes z again.
struct GateProjection {
  static constexpr const char *fwd = "gate_projection_fwd", *bwd = "gate_projection_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&, const GateForward& a) {
    save(ctx, {a.h, a.weight, a.bias});
    ctx->saved_data["normalizer"] = a.normalizer;
    ctx->saved_data["clamp_min"] = a.clamp_min;
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dh, dweight, dbias] = gate_projection_bwd(
        grads[0], saved[0], saved[1], or_absent(saved[2]), ctx->saved_data["normalizer"].toDouble(),
        ctx->saved_data["clamp_min"].toOptional<double>());
    return {dh, dweight, grad_of(saved[2], dbias)};
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
  differentiable<gate_projection_fwd, gate_projection_bwd, GateProjection>(m);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { register_gate_projection<fwd_meta, bwd_meta>(m); }

}  // namespace gla_ext
