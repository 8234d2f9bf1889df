// fused_recurrent_gla under autograd: forward and backward are the registered operators, nothing
// but the inputs is saved. Gates and the initial state that are absent have no gradient.
#include "checks/recurrent_gla.h"

#include <torch/library.h>

#include "chunk_gla/op.h"
#include "common/output_grad.h"
#include "dispatch/differentiable.h"
#include "ops.h"

namespace gla_ext {
namespace {

struct RecurrentGla {
  static constexpr const char *fwd = "recurrent_gla_fwd", *bwd = "recurrent_gla_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                              const OptionalTensor& gv, const OptionalTensor& initial_state,
                              const OptionalTensor& cu_seqlens, std::optional<double> scale,
                              bool output_final_state, bool reverse, bool state_v_first) {
    save(ctx, {q, k, v, gk, gv, initial_state, cu_seqlens});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["reverse"] = reverse;
    ctx->saved_data["state_v_first"] = state_v_first;
    return output_final_state ? 2 : 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor none, &q = saved[0], &k = saved[1], &v = saved[2], &gk = saved[3],
                           &gv = saved[4], &initial_state = saved[5];
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    const OptionalTensor dht = grads.size() > 1 ? or_absent(grads[1]) : std::nullopt;
    auto [dq, dk, dv, dgk, dgv, dh0] = recurrent_gla_bwd(
        d_o, dht, q, k, v, or_absent(gk), or_absent(gv), or_absent(initial_state),
        or_absent(saved[6]), ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["reverse"].toBool(), ctx->saved_data["state_v_first"].toBool());
    return {dq,
            dk,
            dv,
            gk.defined() ? dgk : none,
            gv.defined() ? dgv : none,
            initial_state.defined() ? dh0 : none};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(RecurrentGla::fwd, Differentiable<recurrent_gla_fwd, RecurrentGla>::run);
  m.impl(RecurrentGla::bwd, DifferentiableOnce<recurrent_gla_bwd, RecurrentGla>::run);
}

}  // namespace gla_ext
