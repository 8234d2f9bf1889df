// chunk_gla under autograd: forward and backward are the registered operators. Saved are the
// inputs, the states where save_states asks for them, and what the device's plan keeps (kept.h).
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "../checks.h"
#include "../ops.h"
#include "kept.h"
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
                               const OptionalTensor& cu_seqlens, std::optional<double> scale,
                               bool output_final_state, bool state_v_first, bool save_states,
                               bool batch_invariant, int64_t kept_bytes,
                               variable_list* not_differentiable) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [o, final_state, states, kept] =
        chunk_gla_fwd(q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state,
                      state_v_first, save_states, batch_invariant, kept_bytes);
    ctx->save_for_backward({q, k, v, or_undefined(g), or_undefined(gv), or_undefined(initial_state),
                            or_undefined(cu_seqlens), states, kept});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["output_final_state"] = output_final_state;
    ctx->saved_data["state_v_first"] = state_v_first;
    ctx->saved_data["batch_invariant"] = batch_invariant;
    ctx->set_materialize_grads(false);
    // What has no gradient goes around the Function: compiled autograd refuses a node that has
    // marked outputs as non-differentiable.
    *not_differentiable = {final_state, states, kept};
    if (output_final_state) return {o, final_state};
    return {o};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &g = saved[3], &gv = saved[4],
                     &initial_state = saved[5];
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    const at::Tensor dht = ctx->saved_data["output_final_state"].toBool() ? grads[1] : at::Tensor();
    auto [dq, dk, dv, dg, dgv, dh0] = chunk_gla_bwd(
        d_o, or_absent(dht), q, k, v, or_absent(g), or_absent(gv), or_absent(initial_state),
        or_absent(saved[6]), saved[7], ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["state_v_first"].toBool(), ctx->saved_data["batch_invariant"].toBool(),
        saved[8]);
    const at::Tensor none;
    return {dq,
            dk,
            dv,
            g.defined() ? dg : none,
            gv.defined() ? dgv : none,
            initial_state.defined() ? dh0 : none,
            none,
            none,
            none,
            none,
            none,
            none,
            none,
            none};
  }
};

class ChunkGlaBackward : public torch::autograd::Function<ChunkGlaBackward> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& d_o,
                               const OptionalTensor& dht, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const OptionalTensor& g,
                               const OptionalTensor& gv, const OptionalTensor& initial_state,
                               const OptionalTensor& cu_seqlens, const at::Tensor& states,
                               std::optional<double> scale, bool state_v_first,
                               bool batch_invariant, const OptionalTensor& kept) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dq, dk, dv, dg, dgv, dh0] =
        chunk_gla_bwd(d_o, dht, q, k, v, g, gv, initial_state, cu_seqlens, states, scale,
                      state_v_first, batch_invariant, kept);
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

ForwardOutputs chunk_gla_fwd_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const OptionalTensor& g, const OptionalTensor& gv,
                                      const OptionalTensor& initial_state,
                                      const OptionalTensor& cu_seqlens, std::optional<double> scale,
                                      bool output_final_state, bool state_v_first, bool save_states,
                                      bool batch_invariant, int64_t kept_bytes) {
  refuse_unsupported("chunk_gla", {{"q", q}, {"k", k}, {"v", v}}, {g, gv, initial_state});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return chunk_gla_fwd(q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state,
                         state_v_first, save_states, batch_invariant, kept_bytes);
  }
  const bool planned = kept_bytes == kPlannedBytes;
  if (planned && needs_gradient({q, k, v}, {g, gv, initial_state}))
    kept_bytes = bytes_to_keep({q, k, v, g, gv, cu_seqlens, save_states, batch_invariant});
  variable_list rest;  // what has no gradient: final_state, states, kept
  auto outputs =
      ChunkGla::apply(q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state,
                      state_v_first, save_states, batch_invariant, kept_bytes, &rest);
  // Of the operator's caller nothing holds what it has not asked for.
  const at::Tensor kept = planned && kept_bytes > 0 ? rest[2].new_empty({0}) : rest[2];
  return {outputs[0], output_final_state ? outputs[1] : rest[0], rest[1], kept};
}

BackwardOutputs chunk_gla_bwd_autograd(const at::Tensor& d_o, const OptionalTensor& dht,
                                       const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const OptionalTensor& g,
                                       const OptionalTensor& gv,
                                       const OptionalTensor& initial_state,
                                       const OptionalTensor& cu_seqlens, const at::Tensor& states,
                                       std::optional<double> scale, bool state_v_first,
                                       bool batch_invariant, const OptionalTensor& kept) {
  refuse_unsupported("chunk_gla_bwd", {{"do", d_o}, {"q", q}, {"k", k}, {"v", v}},
                     {dht, g, gv, initial_state});
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return chunk_gla_bwd(d_o, dht, q, k, v, g, gv, initial_state, cu_seqlens, states, scale,
                         state_v_first, batch_invariant, kept);
  }
  auto outputs = ChunkGlaBackward::apply(d_o, dht, q, k, v, g, gv, initial_state, cu_seqlens,
                                         states, scale, state_v_first, batch_invariant, kept);
  return {outputs[0], outputs[1], outputs[2], outputs[3], outputs[4], outputs[5]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("chunk_gla_fwd", chunk_gla_fwd_autograd);
  m.impl("chunk_gla_bwd", chunk_gla_bwd_autograd);
}

}  // namespace gla_ext
