// SwiGLU, alone and with the linear map after it.
#include "op.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>

#include "dispatch/autocast.h"
#include "dispatch/checker.h"
#include "dispatch/differentiable.h"
#include "dispatch/linear_map.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"

namespace gla_ext {

at::Tensor swiglu_fwd(const at::Tensor& gate, const at::Tensor& up) {
  static const Op<decltype(swiglu_fwd)> op("gla_ext::swiglu_fwd");
  return op(gate, up);
}

SwigluBackwardOutputs swiglu_bwd(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up,
                                 bool product) {
  static const Op<decltype(swiglu_bwd)> op("gla_ext::swiglu_bwd");
  return op(dy, gate, up, product);
}

at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const OptionalTensor& bias) {
  static const Op<decltype(swiglu_linear)> op("gla_ext::swiglu_linear");
  return op(gate, up, weight, bias);
}

// Checks of the operators' arguments.
namespace {

// Checks gate and tensors of its shape [..., D]. All must have its dtype, `others` too.
void check_inputs(const char* op, const NamedTensors& like_gate, const NamedTensors& others = {}) {
  const at::Tensor& gate = *like_gate[0].second;
  const Checker check(op, "gate", gate);
  NamedTensors all = like_gate;
  all.insert(all.end(), others.begin(), others.end());
  check.alike(all);
  TORCH_CHECK_VALUE(gate.dim() >= 1, op,
                    ": expected gate to have at least 1 dimension [..., D], got 0");
  check.shapes(like_gate, "[..., D]", gate.sym_sizes().vec());
}

}  // namespace

void check_swiglu_fwd(const at::Tensor& gate, const at::Tensor& up) {
  check_inputs("swiglu", {{"gate", &gate}, {"up", &up}});
}

void check_swiglu_bwd(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up) {
  check_inputs("swiglu_bwd", {{"gate", &gate}, {"up", &up}, {"dy", &dy}});
}

namespace {

void check_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const OptionalTensor& bias) {
  const char* op = "swiglu_linear";
  check_inputs(op, {{"gate", &gate}, {"up", &up}},
               {{"weight", &weight}, {"bias", where_given(bias)}});
  const Checker check(op, "gate", gate);
  check.rank("weight", weight, 2, "[N, D]");
  const c10::SymInt N = weight.sym_size(0);
  check.shape("weight", weight, "[N, D]", {N, gate.sym_size(-1)});
  if (given(bias)) check.shape("bias", *bias, "[N]", {N});
}

// A backend for traced graphs, which runs nothing.
struct Traced {
  static void forward(const char*, const std::vector<at::Tensor>&, const at::Tensor&) {}
  static void backward(const char*, const std::vector<at::Tensor>&, const at::Tensor&,
                       const at::Tensor&, const at::Tensor&) {}
};

// Saves only the inputs.
struct Swiglu {
  static constexpr const char *fwd = "swiglu_fwd", *bwd = "swiglu_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&, const at::Tensor& gate,
                              const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dgate, dup, y] = swiglu_bwd(grads[0], saved[0], saved[1], /*product=*/false);
    return {dgate, dup};
  }
};

// Uses only registered operators and torch's, so that a traced graph holds no others.
at::Tensor linear_of_product(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                             const OptionalTensor& bias) {
  check_swiglu_linear(gate, up, weight, bias);
  return at::linear(swiglu_fwd(gate, up), weight, bias);
}

// Backward computes the product again, which the gradient of the weight needs.
class SwigluLinear : public torch::autograd::Function<SwigluLinear> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up,
                            const at::Tensor& weight, const OptionalTensor& bias) {
    ctx->save_for_backward({gate, up, weight});
    ctx->saved_data["bias"] = given(bias);
    ctx->set_materialize_grads(false);
    return linear_of_product(gate, up, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::Tensor dgate, dup, dweight, dbias;
    const at::Tensor& d_out = grads[0];
    if (!d_out.defined()) return {dgate, dup, dweight, dbias};
    // Runs in the dtypes of forward, whatever autocast is active around backward.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &weight = saved[2];
    const bool needs_dweight = ctx->needs_input_grad(2);
    at::Tensor y;
    if (ctx->needs_input_grad(0) || ctx->needs_input_grad(1))
      std::tie(dgate, dup, y) = swiglu_bwd(at::matmul(d_out, weight), gate, up, needs_dweight);
    else if (needs_dweight)
      y = swiglu_fwd(gate, up);
    if (needs_dweight) dweight = at::mm(as_matrix(d_out).t(), as_matrix(y));
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(3))
      dbias = as_matrix(d_out).sum(0);
    return {dgate, dup, dweight, dbias};
  }
};

at::Tensor swiglu_linear_autograd(const at::Tensor& gate, const at::Tensor& up,
                                  const at::Tensor& weight, const OptionalTensor& bias) {
  refuse_unsupported("swiglu_linear", gate, up, weight, bias);
  if (!at::GradMode::is_enabled()) return linear_of_product(gate, up, weight, bias);
  return SwigluLinear::apply(gate, up, weight, bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m, "swiglu_fwd(Tensor gate, Tensor up) -> Tensor");
  define(m,
         "swiglu_bwd(Tensor dy, Tensor gate, Tensor up, bool product) -> (Tensor dgate, Tensor "
         "dup, Tensor y)");
  define_composite(m,
                   "swiglu_linear(Tensor gate, Tensor up, Tensor weight, Tensor? bias) -> Tensor",
                   linear_of_product);
  autocast_first<4, swiglu_linear>(m, "swiglu_linear");
  differentiable<swiglu_fwd, swiglu_bwd, Swiglu>(m);
  m.impl("swiglu_linear", torch::dispatch(c10::DispatchKey::Autograd, swiglu_linear_autograd));
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { SwigluOn<Traced>::register_in(m); }

}  // namespace gla_ext
