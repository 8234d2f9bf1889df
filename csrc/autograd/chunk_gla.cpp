// chunk_gla under autograd: forward and backward are the registered operators. Saved are the
// inputs and what the device's plan leaves for backward (for_backward.h).
#include "checks/chunk_gla.h"

#include <torch/library.h>

#include <algorithm>

#include "dispatch/differentiable.h"
#include "for_backward.h"
#include "common/output_grad.h"
#include "ops.h"
#include "dispatch/refuse.h"

namespace gla_ext {
namespace {

struct ChunkGla {
  static constexpr const char *fwd = "chunk_gla_fwd", *bwd = "chunk_gla_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list& outputs,
                              const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const OptionalTensor& g, const OptionalTensor& gv,
                              const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                              std::optional<double> scale, bool output_final_state,
                              bool state_v_first, bool batch_invariant, int64_t) {
    save(ctx, {q, k, v, g, gv, initial_state, cu_seqlens, /*for_backward=*/outputs[2]});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["state_v_first"] = state_v_first;
    ctx->saved_data["batch_invariant"] = batch_invariant;
    return output_final_state ? 2 : 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor none, &q = saved[0], &k = saved[1], &v = saved[2], &g = saved[3],
                           &gv = saved[4], &initial_state = saved[5];
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    const OptionalTensor dht = grads.size() > 1 ? or_absent(grads[1]) : std::nullopt;
    const bool gate_gradient = g.defined() && ctx->needs_input_grad(3);
    auto [dq, dk, dv, dg, dgv, dh0] =
        chunk_gla_bwd(d_o, dht, q, k, v, or_absent(g), or_absent(gv), or_absent(initial_state),
                      or_absent(saved[6]), ctx->saved_data["scale"].toOptional<double>(),
                      ctx->saved_data["state_v_first"].toBool(),
                      ctx->saved_data["batch_invariant"].toBool(), saved[7], gate_gradient);
    return {dq,
            dk,
            dv,
            gate_gradient ? dg : none,
            gv.defined() ? dgv : none,
            initial_state.defined() ? dh0 : none};
  }
};

bool needs_gradient(std::initializer_list<at::Tensor> tensors,
                    std::initializer_list<OptionalTensor> optional) {
  const auto needs = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  return std::any_of(tensors.begin(), tensors.end(), needs) ||
         std::any_of(optional.begin(), optional.end(),
                     [&](const OptionalTensor& t) { return t.has_value() && needs(*t); });
}

ForwardOutputs chunk_gla_fwd_autograd(const ForwardArguments& a) {
  refuse_unsupported(ChunkGla::fwd, a.q, a.k, a.v, a.g, a.gv, a.initial_state);
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return dispatch(a);
  }
  const bool planned = a.for_backward_bytes == kPlannedBytes &&
                       needs_gradient({a.q, a.k, a.v}, {a.g, a.gv, a.initial_state});
  const int64_t bytes = planned ? for_backward_bytes(a) : a.for_backward_bytes;
  auto [o, final_state, for_backward] = Differentiable<chunk_gla_fwd, ChunkGla>::record(
      a.q, a.k, a.v, a.g, a.gv, a.initial_state, a.cu_seqlens, a.scale, a.output_final_state,
      a.state_v_first, a.batch_invariant, bytes);
  // The caller of the operator holds nothing that it has not asked for.
  if (planned && bytes > 0) for_backward = for_backward.new_empty({0});
  return {o, final_state, for_backward};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(ChunkGla::fwd, positional<chunk_gla_fwd_autograd>);
  m.impl(ChunkGla::bwd, DifferentiableOnce<chunk_gla_bwd, ChunkGla>::run);
}

}  // namespace gla_ext
