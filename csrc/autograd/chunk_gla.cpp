// chunk_gla under autograd: forward and backward are the registered operators. Saved are the
// inputs and what the device's plan leaves for backward (for_backward.h).
#include "checks/chunk_gla.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "for_backward.h"
#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class ChunkGla : public torch::autograd::Function<ChunkGla> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const OptionalTensor& g,
                               const OptionalTensor& gv, const OptionalTensor& initial_state,
                               const ForwardArguments& a, variable_list* not_differentiable) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [o, final_state, for_backward] = dispatch(a);
    ctx->save_for_backward({q, k, v, or_undefined(g), or_undefined(gv), or_undefined(initial_state),
                            or_undefined(a.cu_seqlens), for_backward});
    ctx->saved_data["scale"] = a.scale;
    ctx->saved_data["output_final_state"] = a.output_final_state;
    ctx->saved_data["state_v_first"] = a.state_v_first;
    ctx->saved_data["batch_invariant"] = a.batch_invariant;
    ctx->set_materialize_grads(false);
    // What has no gradient goes around the Function: compiled autograd refuses a node that has
    // marked outputs as non-differentiable.
    *not_differentiable = {final_state, for_backward};
    if (a.output_final_state) return {o, final_state};
    return {o};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &g = saved[3], &gv = saved[4],
                     &initial_state = saved[5];
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    const at::Tensor dht = ctx->saved_data["output_final_state"].toBool() ? grads[1] : at::Tensor();
    const bool gate_gradient = g.defined() && ctx->needs_input_grad(3);
    auto [dq, dk, dv, dg, dgv, dh0] = chunk_gla_bwd(
        d_o, or_absent(dht), q, k, v, or_absent(g), or_absent(gv), or_absent(initial_state),
        or_absent(saved[6]), ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["state_v_first"].toBool(), ctx->saved_data["batch_invariant"].toBool(),
        saved[7], gate_gradient);
    const at::Tensor none;
    return {dq,
            dk,
            dv,
            gate_gradient ? dg : none,
            gv.defined() ? dgv : none,
            initial_state.defined() ? dh0 : none,
            none,
            none};
  }
};

class ChunkGlaBackward : public torch::autograd::Function<ChunkGlaBackward> {
 public:
  static constexpr bool is_traceable = true;

  // What has a gradient stands beside the arguments, for the Function to see.
  static variable_list forward(AutogradContext*, const at::Tensor&, const OptionalTensor&,
                               const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const BackwardArguments& a) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dq, dk, dv, dg, dgv, dh0] = dispatch(a);
    return {dq, dk, dv, dg, dgv, dh0};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "chunk_gla: double backward is not supported");
  }
};

bool needs_gradient(std::initializer_list<at::Tensor> tensors,
                    std::initializer_list<OptionalTensor> optional) {
  const auto needs = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  return std::any_of(tensors.begin(), tensors.end(), needs) ||
         std::any_of(optional.begin(), optional.end(),
                     [&](const OptionalTensor& t) { return t.has_value() && needs(*t); });
}

ForwardOutputs chunk_gla_fwd_autograd(const ForwardArguments& given_arguments) {
  ForwardArguments a = given_arguments;
  refuse_unsupported("chunk_gla", {{"q", a.q}, {"k", a.k}, {"v", a.v}},
                     {a.g, a.gv, a.initial_state});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return dispatch(a);
  }
  const bool planned = a.for_backward_bytes == kPlannedBytes;
  if (planned && needs_gradient({a.q, a.k, a.v}, {a.g, a.gv, a.initial_state}))
    a.for_backward_bytes = for_backward_bytes(a);
  variable_list rest;  // what has no gradient: final_state, for_backward
  auto outputs = ChunkGla::apply(a.q, a.k, a.v, a.g, a.gv, a.initial_state, a, &rest);
  // The caller of the operator holds nothing that it has not asked for.
  const at::Tensor for_backward =
      planned && a.for_backward_bytes > 0 ? rest[1].new_empty({0}) : rest[1];
  return {outputs[0], a.output_final_state ? outputs[1] : rest[0], for_backward};
}

BackwardOutputs chunk_gla_bwd_autograd(const BackwardArguments& a) {
  refuse_unsupported("chunk_gla_bwd", {{"do", a.d_o}, {"q", a.q}, {"k", a.k}, {"v", a.v}},
                     {a.dht, a.g, a.gv, a.initial_state});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return dispatch(a);
  }
  auto outputs =
      ChunkGlaBackward::apply(a.d_o, a.dht, a.q, a.k, a.v, a.g, a.gv, a.initial_state, a);
  return {outputs[0], outputs[1], outputs[2], outputs[3], outputs[4], outputs[5]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("chunk_gla_fwd", positional<chunk_gla_fwd_autograd>);
  m.impl("chunk_gla_bwd", positional<chunk_gla_bwd_autograd>);
}

}  // namespace gla_ext
