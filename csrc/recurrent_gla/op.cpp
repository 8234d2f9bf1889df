// fused_recurrent_gla. pool.cpp has the operators on a pool of states.
#include "op.h"

#include "dispatch/autocast.h"
#include "dispatch/differentiable.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"

namespace gla_ext {

RecurrentForwardOutputs recurrent_gla_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
    const OptionalTensor& gv, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
    std::optional<double> scale, bool output_final_state, bool reverse, bool state_v_first) {
  static const Op<decltype(recurrent_gla_fwd)> op("gla_ext::recurrent_gla_fwd");
  return op(q, k, v, gk, gv, initial_state, cu_seqlens, scale, output_final_state, reverse,
            state_v_first);
}

BackwardOutputs recurrent_gla_bwd(const at::Tensor& d_o, const OptionalTensor& dht,
                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const OptionalTensor& gk, const OptionalTensor& gv,
                                  const OptionalTensor& initial_state,
                                  const OptionalTensor& cu_seqlens, std::optional<double> scale,
                                  bool reverse, bool state_v_first) {
  static const Op<decltype(recurrent_gla_bwd)> op("gla_ext::recurrent_gla_bwd");
  return op(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, scale, reverse, state_v_first);
}

// Checks of the operators' arguments.
namespace {

template <class Arguments>
Shape check_sequences(const Checker& check, const char* op, const Arguments& a) {
  Shape shape = check_tokens(check, {op, &a.q, &a.k, &a.v, &a.gk, &a.gv});
  check.offsets(a.cu_seqlens, shape);
  check.state("initial_state", a.initial_state, shape, a.state_v_first);
  return shape;
}

}  // namespace

Shape check_recurrent_fwd(const RecurrentForwardArguments& a) {
  const char* op = "fused_recurrent_gla";
  return check_sequences(Checker(op, "q", a.q), op, a);
}

Shape check_recurrent_bwd(const RecurrentBackwardArguments& a) {
  const char* op = "recurrent_gla_bwd";
  const Checker check(op, "q", a.q);
  const Shape shape = check_sequences(check, op, a);
  check_output_grad(check, a.d_o, shape);
  check.state("dht", a.dht, shape, a.state_v_first);
  return shape;
}

namespace {

// Results of the operators while a graph is traced.
RecurrentForwardOutputs fwd_meta(const RecurrentForwardArguments& a) {
  const Shape s = check_recurrent_fwd(a);
  return {fresh_output(s, a.v), boundary_state_if(a.output_final_state, s, a.q, a.state_v_first)};
}

BackwardOutputs bwd_meta(const RecurrentBackwardArguments& a) {
  return fresh_gradients(check_recurrent_bwd(a), a.q, a.k, a.v, a.gk, a.gv, a.initial_state,
                         a.state_v_first);
}

// Nothing but the inputs is saved. Gates and the initial state that are absent have no gradient.
struct RecurrentGla {
  static constexpr const char *fwd = "recurrent_gla_fwd", *bwd = "recurrent_gla_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&,
                              const RecurrentForwardArguments& a) {
    save(ctx, {a.q, a.k, a.v, a.gk, a.gv, a.initial_state, a.cu_seqlens});
    ctx->saved_data["scale"] = a.scale;
    ctx->saved_data["reverse"] = a.reverse;
    ctx->saved_data["state_v_first"] = a.state_v_first;
    return a.output_final_state ? 2 : 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &gk = saved[3], &gv = saved[4],
                     &initial_state = saved[5];
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    const OptionalTensor dht = grads.size() > 1 ? or_absent(grads[1]) : std::nullopt;
    auto [dq, dk, dv, dgk, dgv, dh0] = recurrent_gla_bwd(
        d_o, dht, q, k, v, or_absent(gk), or_absent(gv), or_absent(initial_state),
        or_absent(saved[6]), ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["reverse"].toBool(), ctx->saved_data["state_v_first"].toBool());
    return {dq, dk, dv, grad_of(gk, dgk), grad_of(gv, dgv), grad_of(initial_state, dh0)};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "recurrent_gla_fwd(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor? "
         "initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, bool reverse, "
         "bool state_v_first) -> (Tensor o, Tensor final_state)",
         "fused_recurrent_gla");
  define(m,
         "recurrent_gla_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? gk, "
         "Tensor? gv, Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool reverse, bool "
         "state_v_first) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dgk, Tensor dgv, Tensor dh0)");
  autocast_first<3, recurrent_gla_fwd>(m, "recurrent_gla_fwd");
  differentiable<recurrent_gla_fwd, recurrent_gla_bwd, RecurrentGla>(m);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl(RecurrentGla::fwd, by_arguments<recurrent_gla_fwd, fwd_meta>);
  m.impl(RecurrentGla::bwd, by_arguments<recurrent_gla_bwd, bwd_meta>);
}

}  // namespace gla_ext
