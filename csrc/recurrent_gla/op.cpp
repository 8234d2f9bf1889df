// fused_recurrent_gla. pool.cpp has the same on a pool of states.
#include "op.h"

#include "common/output_grad.h"
#include "dispatch/autocast.h"
#include "dispatch/differentiable.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"
#include "ops.h"

namespace gla_ext {

RecurrentForwardOutputs recurrent_gla_fwd(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const std::optional<at::Tensor>& gk,
                                          const std::optional<at::Tensor>& gv,
                                          const std::optional<at::Tensor>& initial_state,
                                          const std::optional<at::Tensor>& cu_seqlens,
                                          std::optional<double> scale, bool output_final_state,
                                          bool reverse, bool state_v_first) {
  static const Op<decltype(recurrent_gla_fwd)> op("gla_ext::recurrent_gla_fwd");
  return op(q, k, v, gk, gv, initial_state, cu_seqlens, scale, output_final_state, reverse,
            state_v_first);
}

BackwardOutputs recurrent_gla_bwd(const at::Tensor& d_o, const std::optional<at::Tensor>& dht,
                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const std::optional<at::Tensor>& gk,
                                  const std::optional<at::Tensor>& gv,
                                  const std::optional<at::Tensor>& initial_state,
                                  const std::optional<at::Tensor>& cu_seqlens,
                                  std::optional<double> scale, bool reverse, bool state_v_first) {
  static const Op<decltype(recurrent_gla_bwd)> op("gla_ext::recurrent_gla_bwd");
  return op(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, scale, reverse, state_v_first);
}

// What they take.
Shape check_tokens(const Checker& check, const RecurrentInputs& in) {
  struct Input {
    const char* name;
    const at::Tensor* t;
  };
  const auto gate = [](const OptionalTensor* t) { return given(*t) ? &**t : nullptr; };
  const std::array<Input, 3> inputs{{{"q", in.q}, {"k", in.k}, {"v", in.v}}};
  const std::array<Input, 2> gates{{{"gk", gate(in.gk)}, {"gv", gate(in.gv)}}};
  const bool has_q = in.q != nullptr;
  const at::Tensor& first = has_q ? *in.q : *in.k;
  const auto for_each = [&](const auto& list, auto&& f) {
    for (const Input& x : list)
      if (x.t != nullptr) f(x);
  };
  for_each(inputs, [&](const Input& x) { check.defined(x.name, *x.t); });
  for_each(inputs, [&](const Input& x) { check.strided(x.name, *x.t); });
  for_each(gates, [&](const Input& x) { check.strided(x.name, *x.t); });
  for_each(inputs, [&](const Input& x) { check.device(x.name, *x.t); });
  for_each(gates, [&](const Input& x) { check.device(x.name, *x.t); });
  check.floating(has_q ? "q" : "k", first);
  for_each(inputs, [&](const Input& x) { check.like_first(x.name, *x.t, first.scalar_type()); });
  const bool fp64 = first.scalar_type() == at::kDouble;
  for_each(gates, [&](const Input& x) { check.gate_dtype(x.name, *x.t, fp64); });
  if (has_q) check.rank("q", *in.q, 4, "[B, T, H, K]");
  check.rank("k", *in.k, 4, "[B, T, HK, K]");
  check.rank("v", *in.v, 4, "[B, T, HK, V]");
  Shape shape{first.sym_size(0),
              first.sym_size(1),
              first.sym_size(2),
              first.sym_size(3),
              in.v->sym_size(3),
              0,
              0};
  shape.dtype = first.scalar_type();
  shape.accumulate = fp64 ? at::kDouble : at::kFloat;
  check.at_least_one("the last dimension", has_q ? "q" : "k", shape.K);
  check.at_least_one("the last dimension", "v", shape.V);
  const c10::SymInt HK = in.k->sym_size(2);
  const Sizes keys{shape.B, shape.T, HK, shape.K}, values{shape.B, shape.T, HK, shape.V};
  check.shape("k", *in.k, "[B, T, HK, K]", keys);
  if (has_q) check.divides_heads(HK, shape.H);
  check.shape("v", *in.v, "[B, T, HK, V]", values);
  if (given(*in.gk)) check.key_gate("gk", **in.gk, keys);
  if (given(*in.gv)) check.shape("gv", **in.gv, "[B, T, HK, V]", values);
  return shape;
}

namespace {

Shape check_sequences(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const OptionalTensor& gk, const OptionalTensor& gv,
                      const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                      bool state_v_first) {
  const Checker check(op, "q", q);
  Shape shape = check_tokens(check, {op, &q, &k, &v, &gk, &gv});
  check.offsets(cu_seqlens, shape);
  check.state("initial_state", initial_state, shape, state_v_first);
  return shape;
}

}  // namespace

Shape check_recurrent_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const OptionalTensor& gk, const OptionalTensor& gv,
                          const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                          bool state_v_first) {
  return check_sequences("fused_recurrent_gla", q, k, v, gk, gv, initial_state, cu_seqlens,
                         state_v_first);
}

Shape check_recurrent_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                          const OptionalTensor& gv, const OptionalTensor& initial_state,
                          const OptionalTensor& cu_seqlens, bool state_v_first) {
  const char* op = "recurrent_gla_bwd";
  Shape shape = check_sequences(op, q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  const Checker check(op, "q", q);
  check.defined("do", d_o);
  check.strided("do", d_o);
  check.device("do", d_o);
  check.like_first("do", d_o, q.scalar_type());
  check.shape("do", d_o, "[B, T, H, V]", {shape.B, shape.T, shape.H, shape.V});
  check.state("dht", dht, shape, state_v_first);
  return shape;
}

namespace {

// What they return while a graph is traced.
RecurrentForwardOutputs fwd_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const OptionalTensor& gk, const OptionalTensor& gv,
                                 const OptionalTensor& initial_state,
                                 const OptionalTensor& cu_seqlens, std::optional<double>,
                                 bool output_final_state, bool, bool state_v_first) {
  const Shape s = check_recurrent_fwd(q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  return {fresh_output(s, v),
          output_final_state ? boundary_state(s, q, state_v_first) : empty({0}, q, s.accumulate)};
}

BackwardOutputs bwd_meta(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                         const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                         const OptionalTensor& gv, const OptionalTensor& initial_state,
                         const OptionalTensor& cu_seqlens, std::optional<double>, bool,
                         bool state_v_first) {
  const Shape s =
      check_recurrent_bwd(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  return {fresh(q),
          fresh(k),
          fresh(v),
          gate_grad(gk, q, s),
          gate_grad(gv, q, s),
          given(initial_state) ? boundary_state(s, q, state_v_first) : empty({0}, q, s.accumulate)};
}

// Nothing but the inputs is saved. Gates and the initial state that are absent have no gradient.
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
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl(RecurrentGla::fwd, fwd_meta);
  m.impl(RecurrentGla::bwd, bwd_meta);
}

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(RecurrentGla::fwd, Differentiable<recurrent_gla_fwd, RecurrentGla>::run);
  m.impl(RecurrentGla::bwd, DifferentiableOnce<recurrent_gla_bwd, RecurrentGla>::run);
}

}  // namespace gla_ext
