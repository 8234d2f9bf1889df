// The norm of rows with its gate, alone and with the linear map after it, and the norm of a
// residual stream.
#include "op.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>

#include <array>
#include <utility>

#include "dispatch/autocast.h"
#include "dispatch/checker.h"
#include "dispatch/differentiable.h"
#include "dispatch/linear_map.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"

namespace gla_ext {

NormForwardOutputs rms_norm_gate_fwd(const at::Tensor& x, const OptionalTensor& weight,
                                     const OptionalTensor& gate, std::string_view activation,
                                     double eps) {
  static const Op<decltype(rms_norm_gate_fwd)> op("gla_ext::rms_norm_gate_fwd");
  return op(x, weight, gate, activation, eps);
}

NormBackwardOutputs rms_norm_gate_bwd(const at::Tensor& dy, const at::Tensor& x,
                                      const OptionalTensor& weight, const OptionalTensor& gate,
                                      const at::Tensor& rstd, std::string_view activation,
                                      bool output) {
  static const Op<decltype(rms_norm_gate_bwd)> op("gla_ext::rms_norm_gate_bwd");
  return op(dy, x, weight, gate, rstd, activation, output);
}

NormResidualForwardOutputs rms_norm_residual_fwd(const at::Tensor& x, const at::Tensor& residual,
                                                 const OptionalTensor& weight, double eps) {
  static const Op<decltype(rms_norm_residual_fwd)> op("gla_ext::rms_norm_residual_fwd");
  return op(x, residual, weight, eps);
}

NormResidualBackwardOutputs rms_norm_residual_bwd(const at::Tensor& dy,
                                                  const OptionalTensor& dstream,
                                                  const at::Tensor& stream,
                                                  const OptionalTensor& weight,
                                                  const at::Tensor& rstd) {
  static const Op<decltype(rms_norm_residual_bwd)> op("gla_ext::rms_norm_residual_bwd");
  return op(dy, dstream, stream, weight, rstd);
}

at::Tensor norm_gate_linear(const at::Tensor& o, const at::Tensor& gate, const at::Tensor& weight,
                            const OptionalTensor& norm_weight, std::string_view activation,
                            double eps) {
  static const Op<decltype(norm_gate_linear)> op("gla_ext::norm_gate_linear");
  return op(o, gate, weight, norm_weight, activation, eps);
}

// Checks of the operators' arguments.
namespace {

// Finds an activation by its name, or raises.
Activation activation_of(const char* op, std::string_view name) {
  constexpr std::array<std::pair<std::string_view, Activation>, 7> kNames{
      {{"relu", Activation::kRelu},
       {"sigmoid", Activation::kSigmoid},
       {"logsigmoid", Activation::kLogSigmoid},
       {"silu", Activation::kSwish},
       {"swish", Activation::kSwish},
       {"sqrelu", Activation::kSquaredRelu},
       {"gelu", Activation::kGelu}}};
  std::string known;
  for (const auto& [key, activation] : kNames) {
    if (key == name) return activation;
    known.append(known.empty() ? "" : ", ").append(key);
  }
  TORCH_CHECK_VALUE(false, op, ": expected activation to be one of ", known, ", got '", name, "'");
}

// Checks x and tensors of its shape and dtype; weight [V] may have any dtype.
NormCall check_rows(const char* op, const NamedTensors& like_x, const OptionalTensor& weight,
                    std::string_view activation) {
  const at::Tensor& x = *like_x[0].second;
  const Checker check(op, "x", x);
  check.alike(like_x, {{"weight", where_given(weight)}});
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": expected x to have at least 1 dimension [..., V], got 0");
  check.at_least_one("the last dimension", "x", x.sym_size(-1));
  check.shapes(like_x, "[..., V]", x.sym_sizes().vec());
  if (given(weight)) check.shape("weight", *weight, "[V]", {x.sym_size(-1)});
  return {activation_of(op, activation), accumulate_of(x)};
}

void check_rstd(const Checker& check, const at::Tensor& x, const at::Tensor& rstd,
                const NormCall& call) {
  check.placed("rstd", rstd);
  check.dtype("rstd", rstd, call.accumulate, "");
  const auto sizes = x.sym_sizes();
  check.shape("rstd", rstd, "[...]", Sizes(sizes.begin(), sizes.end() - 1));
}

// Checks that a stream has x's shape, and x's dtype or that of sums.
void check_stream(const Checker& check, const char* name, const at::Tensor& t,
                  const at::Tensor& x) {
  check.placed(name, t);
  if (x.scalar_type() == at::kDouble || t.scalar_type() != at::kFloat)
    check.like_first(name, t, x.scalar_type());
  check.shape(name, t, "[..., V]", x.sym_sizes().vec());
}

}  // namespace

NormCall check_norm(const NormGateForward& a) {
  return check_rows("rms_norm_gate", {{"x", &a.x}, {"gate", where_given(a.gate)}}, a.weight,
                    a.activation);
}

NormCall check_norm(const NormGateBackward& a) {
  const char* op = "rms_norm_gate_bwd";
  const NormCall call = check_rows(op, {{"x", &a.x}, {"dy", &a.dy}, {"gate", where_given(a.gate)}},
                                   a.weight, a.activation);
  check_rstd(Checker(op, "x", a.x), a.x, a.rstd, call);
  return call;
}

NormCall check_norm(const NormResidualForward& a) {
  const char* op = "rms_norm_residual";
  const NormCall call = check_rows(op, {{"x", &a.x}}, a.weight, "swish");
  check_stream(Checker(op, "x", a.x), "residual", a.residual, a.x);
  return call;
}

NormCall check_norm(const NormResidualBackward& a) {
  const char* op = "rms_norm_residual_bwd";
  const NormCall call = check_rows(op, {{"dy", &a.dy}}, a.weight, "swish");
  const Checker check(op, "dy", a.dy);
  check_stream(check, "stream", a.stream, a.dy);
  if (given(a.dstream)) {
    check_stream(check, "dstream", *a.dstream, a.dy);
    check.dtype("dstream", *a.dstream, a.stream.scalar_type(), " like stream");
  }
  check_rstd(check, a.dy, a.rstd, call);
  return call;
}

namespace {

// A backend for traced graphs, which runs nothing.
struct Traced {
  template <typename F>
  static void with(const char*, const NormCall&, const std::vector<at::Tensor>&,
                   const OptionalTensor&, double, const F&) {}
};

// Saves x, weight, gate and rstd, which is one number per row.
struct RmsNormGate {
  static constexpr const char *fwd = "rms_norm_gate_fwd", *bwd = "rms_norm_gate_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list& outputs,
                              const NormGateForward& a) {
    save(ctx, {a.x, a.weight, a.gate, /*rstd=*/outputs[1]});
    ctx->saved_data["activation"] = std::string(a.activation);
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &gate = saved[2], &rstd = saved[3];
    auto [dx, dweight, dgate, y] =
        rms_norm_gate_bwd(grads[0], x, or_absent(weight), or_absent(gate), rstd,
                          ctx->saved_data["activation"].toStringView(), /*output=*/false);
    return {dx, grad_of(weight, dweight), grad_of(gate, dgate)};
  }
};

// Saves the stream (an output), weight and rstd.
struct RmsNormResidual {
  static constexpr const char *fwd = "rms_norm_residual_fwd", *bwd = "rms_norm_residual_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list& outputs,
                              const NormResidualForward& a) {
    save(ctx, {/*stream=*/outputs[1], a.weight, /*rstd=*/outputs[2]});
    ctx->saved_data["dtype"] = a.x.scalar_type();
    return 2;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor &dy = grads[0], &dstream = grads[1];
    if (!dy.defined()) return {dstream.to(ctx->saved_data["dtype"].toScalarType()), dstream};
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &stream = saved[0], &weight = saved[1], &rstd = saved[2];
    auto [dx, dresidual, dweight] =
        rms_norm_residual_bwd(dy, or_absent(dstream), stream, or_absent(weight), rstd);
    const bool both = dy.scalar_type() == stream.scalar_type();
    return {both ? dresidual : dx, dresidual, grad_of(weight, dweight)};
  }
};

// [..., H V] -> [..., H, V], the shape of o, and back.
at::Tensor by_heads(const at::Tensor& t, const at::Tensor& o) {
  return t.reshape_symint(o.sym_sizes());
}
at::Tensor side_by_side(const at::Tensor& t) {  // is_grads_batched has no rule for flatten
  auto sizes = t.sym_sizes().vec();
  const c10::SymInt V = sizes.back();
  sizes.pop_back();
  sizes.back() *= V;
  return t.reshape_symint(sizes);
}

// The linear map of the norm, and rstd. Uses only registered operators and torch's, so that a
// traced graph holds no others.
std::tuple<at::Tensor, at::Tensor> linear_of_norm(const at::Tensor& o, const at::Tensor& gate,
                                                  const at::Tensor& weight,
                                                  const OptionalTensor& norm_weight,
                                                  std::string_view activation, double eps) {
  check_norm_gate_map("norm_gate_linear", o, norm_weight, gate, weight);
  activation_of("norm_gate_linear", activation);
  auto [y, rstd] = rms_norm_gate_fwd(o, norm_weight, by_heads(gate, o), activation, eps);
  return {at::linear(side_by_side(y), weight), rstd};
}

at::Tensor norm_gate_linear_composed(const at::Tensor& o, const at::Tensor& gate,
                                     const at::Tensor& weight, const OptionalTensor& norm_weight,
                                     std::string_view activation, double eps) {
  return std::get<0>(linear_of_norm(o, gate, weight, norm_weight, activation, eps));
}

// Backward computes the norm again, which the gradient of the weight needs.
class NormGateLinear : public torch::autograd::Function<NormGateLinear> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& o, const at::Tensor& gate,
                            const at::Tensor& weight, const OptionalTensor& norm_weight,
                            std::string_view activation, double eps) {
    auto [result, rstd] = linear_of_norm(o, gate, weight, norm_weight, activation, eps);
    ctx->save_for_backward({o, gate, weight, or_undefined(norm_weight), rstd});
    ctx->saved_data["activation"] = std::string(activation);
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::Tensor d_o, dgate, dweight, dnorm_weight, y;
    const at::Tensor none, &d_out = grads[0];
    if (!d_out.defined()) return {none, none, none, none, none, none};
    // Runs in the dtypes of forward, whatever autocast is active around backward.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &o = saved[0], &weight = saved[2], &norm_weight = saved[3];
    const at::Tensor gate = by_heads(saved[1], o);
    const std::string_view activation = ctx->saved_data["activation"].toStringView();
    const bool weighted = norm_weight.defined();
    const bool needs_dweight = ctx->needs_input_grad(2);
    const bool needs_dnorm = ctx->needs_input_grad(0) || ctx->needs_input_grad(1) ||
                             (weighted && ctx->needs_input_grad(3));
    // With create_graph y comes from the norm operator itself, which can be differentiated.
    const bool with_y = needs_dweight && !at::GradMode::is_enabled();
    if (needs_dnorm) {
      std::tie(d_o, dnorm_weight, dgate, y) =
          rms_norm_gate_bwd(by_heads(at::matmul(d_out, weight), o), o, or_absent(norm_weight), gate,
                            saved[4], activation, with_y);
      dgate = side_by_side(dgate);
    }
    if (needs_dweight) {
      if (!needs_dnorm || !with_y)
        y = std::get<0>(rms_norm_gate_fwd(o, or_absent(norm_weight), gate, activation,
                                          ctx->saved_data["eps"].toDouble()));
      dweight = at::mm(as_matrix(d_out).t(), as_matrix(side_by_side(y)));
    }
    return {d_o, dgate, dweight, weighted ? dnorm_weight : none, none, none};
  }
};

at::Tensor norm_gate_linear_autograd(const at::Tensor& o, const at::Tensor& gate,
                                     const at::Tensor& weight, const OptionalTensor& norm_weight,
                                     std::string_view activation, double eps) {
  refuse_unsupported("norm_gate_linear", o, gate, weight, norm_weight);
  const bool trains_norm = o.requires_grad() || gate.requires_grad() ||
                           (given(norm_weight) && norm_weight->requires_grad());
  // If the norm has no gradient, only the result need be kept.
  if (!at::GradMode::is_enabled() || !trains_norm)
    return norm_gate_linear_composed(o, gate, weight, norm_weight, activation, eps);
  return NormGateLinear::apply(o, gate, weight, norm_weight, activation, eps);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "rms_norm_gate_fwd(Tensor x, Tensor? weight, Tensor? gate, str activation, float eps) -> "
         "(Tensor y, Tensor rstd)");
  define(m,
         "rms_norm_gate_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? gate, Tensor rstd, str "
         "activation, bool output=False) -> (Tensor dx, Tensor dweight, Tensor dgate, Tensor y)");
  define(
      m,
      "rms_norm_residual_fwd(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor y, "
      "Tensor stream, Tensor rstd)");
  define(m,
         "rms_norm_residual_bwd(Tensor dy, Tensor? dstream, Tensor stream, Tensor? weight, Tensor "
         "rstd) -> (Tensor dx, Tensor dresidual, Tensor dweight)");
  define_composite(
      m,
      "norm_gate_linear(Tensor o, Tensor gate, Tensor weight, Tensor? norm_weight, str "
      "activation, float eps) -> Tensor",
      norm_gate_linear_composed);
  autocast_first<3, norm_gate_linear>(m, "norm_gate_linear");  // norm_weight keeps its dtype
  differentiable<rms_norm_gate_fwd, rms_norm_gate_bwd, RmsNormGate>(m);
  differentiable<rms_norm_residual_fwd, rms_norm_residual_bwd, RmsNormResidual>(m);
  m.impl("norm_gate_linear",
         torch::dispatch(c10::DispatchKey::Autograd, norm_gate_linear_autograd));
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { register_norms<Traced>(m); }

}  // namespace gla_ext
