// fused_recurrent_gla under autograd: forward and backward are the registered operators, nothing
// but the inputs is saved. Gates and the initial state that are absent have no gradient.
#include "checks/recurrent_gla.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "checks/chunk_gla.h"
#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class RecurrentGla : public torch::autograd::Function<RecurrentGla> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const OptionalTensor& gk,
                               const OptionalTensor& gv, const OptionalTensor& initial_state,
                               const OptionalTensor& cu_seqlens, std::optional<double> scale,
                               bool output_final_state, bool reverse, bool state_v_first,
                               at::Tensor* not_differentiable) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [o, final_state] = recurrent_gla_fwd(q, k, v, gk, gv, initial_state, cu_seqlens, scale,
                                              output_final_state, reverse, state_v_first);
    ctx->save_for_backward({q, k, v, or_undefined(gk), or_undefined(gv),
                            or_undefined(initial_state), or_undefined(cu_seqlens)});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["output_final_state"] = output_final_state;
    ctx->saved_data["reverse"] = reverse;
    ctx->saved_data["state_v_first"] = state_v_first;
    ctx->set_materialize_grads(false);
    if (output_final_state) return {o, final_state};
    // Around the Function: compiled autograd refuses outputs that are marked as
    // non-differentiable.
    *not_differentiable = final_state;
    return {o};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &gk = saved[3], &gv = saved[4],
                     &initial_state = saved[5];
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    const at::Tensor dht = ctx->saved_data["output_final_state"].toBool() ? grads[1] : at::Tensor();
    auto [dq, dk, dv, dgk, dgv, dh0] = recurrent_gla_bwd(
        d_o, or_absent(dht), q, k, v, or_absent(gk), or_absent(gv), or_absent(initial_state),
        or_absent(saved[6]), ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["reverse"].toBool(), ctx->saved_data["state_v_first"].toBool());
    const at::Tensor none;
    return {dq,
            dk,
            dv,
            gk.defined() ? dgk : none,
            gv.defined() ? dgv : none,
            initial_state.defined() ? dh0 : none,
            none,
            none,
            none,
            none,
            none,
            none};
  }
};

class RecurrentGlaBackward : public torch::autograd::Function<RecurrentGlaBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const at::Tensor& d_o, const OptionalTensor& dht,
                               const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& gk, const OptionalTensor& gv,
                               const OptionalTensor& initial_state,
                               const OptionalTensor& cu_seqlens, std::optional<double> scale,
                               bool reverse, bool state_v_first) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dq, dk, dv, dgk, dgv, dh0] = recurrent_gla_bwd(d_o, dht, q, k, v, gk, gv, initial_state,
                                                         cu_seqlens, scale, reverse, state_v_first);
    return {dq, dk, dv, dgk, dgv, dh0};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "fused_recurrent_gla: double backward is not supported");
  }
};

RecurrentForwardOutputs recurrent_gla_fwd_autograd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
    const OptionalTensor& gv, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
    std::optional<double> scale, bool output_final_state, bool reverse, bool state_v_first) {
  refuse_unsupported("fused_recurrent_gla", {{"q", q}, {"k", k}, {"v", v}},
                     {gk, gv, initial_state});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return recurrent_gla_fwd(q, k, v, gk, gv, initial_state, cu_seqlens, scale, output_final_state,
                             reverse, state_v_first);
  }
  at::Tensor without_gradient;
  auto outputs = RecurrentGla::apply(q, k, v, gk, gv, initial_state, cu_seqlens, scale,
                                     output_final_state, reverse, state_v_first, &without_gradient);
  return {outputs[0], output_final_state ? outputs[1] : without_gradient};
}

BackwardOutputs recurrent_gla_bwd_autograd(
    const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const OptionalTensor& gk, const OptionalTensor& gv,
    const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
    std::optional<double> scale, bool reverse, bool state_v_first) {
  refuse_unsupported("recurrent_gla_bwd", {{"q", q}, {"k", k}, {"v", v}},
                     {d_o, dht, gk, gv, initial_state});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return recurrent_gla_bwd(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, scale, reverse,
                             state_v_first);
  }
  auto outputs = RecurrentGlaBackward::apply(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens,
                                             scale, reverse, state_v_first);
  return {outputs[0], outputs[1], outputs[2], outputs[3], outputs[4], outputs[5]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("recurrent_gla_fwd", recurrent_gla_fwd_autograd);
  m.impl("recurrent_gla_bwd", recurrent_gla_bwd_autograd);
}

}  // namespace gla_ext
