// Shapes and dtypes of every output, for tracing: the checks, then empty tensors. Sizes stay
// symbolic.
#include "dispatch/meta.h"

#include <torch/library.h>

#include "checks/chunk_gla.h"
#include "checks/chunk_pool.h"
#include "checks/recurrent_gla.h"
#include "checks/steps.h"
#include "halves.h"
#include "on_pool.h"
#include "ops.h"

namespace gla_ext {
namespace {

// o, of q's heads.
at::Tensor fresh_output(const Shape& s, const at::Tensor& v) {
  return empty({s.B, s.T, s.H, s.V}, v, v.scalar_type());
}

// The gradient of a gate that may be absent.
at::Tensor gate_grad(const OptionalTensor& g, const at::Tensor& q, const Shape& s) {
  return given(g) ? fresh(*g) : empty({0}, q, s.accumulate);
}

// [N, H, K, V] or v-first.
at::Tensor boundary_state(const Shape& s, const at::Tensor& like, bool v_first) {
  return v_first ? empty({s.N, s.H, s.V, s.K}, like, s.accumulate)
                 : empty({s.N, s.H, s.K, s.V}, like, s.accumulate);
}

at::Tensor chunk_states_like(const Shape& s, const at::Tensor& like, at::ScalarType dtype) {
  return empty({s.B, s.chunks, s.H, s.K, s.V}, like, dtype);
}

ForwardOutputs chunk_gla_fwd_meta(const ForwardArguments& a) {
  const Shape s = check_chunk_gla_fwd(a);
  return {fresh_output(s, a.v),
          a.output_final_state ? boundary_state(s, a.q, a.state_v_first)
                               : empty({0}, a.q, s.accumulate),
          empty({check_for_backward_bytes("chunk_gla", a.for_backward_bytes)}, a.q, at::kByte)};
}

BackwardOutputs chunk_gla_bwd_meta(const BackwardArguments& a) {
  const Shape s = check_chunk_gla_bwd(a);
  return {fresh(a.q),
          fresh(a.k),
          fresh(a.v),
          gate_grad(a.gate_gradient ? a.g : std::nullopt, a.q, s),
          gate_grad(a.gv, a.q, s),
          given(a.initial_state) ? boundary_state(s, a.q, a.state_v_first)
                                 : empty({0}, a.q, s.accumulate)};
}

at::Tensor chunk_gla_on_pool_meta(const PoolArguments& a) {
  const Shape s = check_chunk_gla_on_pool(a);
  return a.out != nullptr ? *a.out : fresh_output(s, a.v);
}

// The halves, whose shared tensors have the sizes that the caller was told.
Shape check_halves(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const OptionalTensor& g, const OptionalTensor& gv,
                   const OptionalTensor& initial_state, bool state_v_first) {
  const OptionalTensor none;
  return check_chunk_gla_fwd(
      {q, k, v, g, gv, initial_state, none, std::nullopt, false, state_v_first, false, 0});
}

std::tuple<at::Tensor, at::Tensor> summary_meta(const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, const OptionalTensor& g,
                                                const OptionalTensor& gv,
                                                const OptionalTensor& initial_state,
                                                std::optional<double>, bool state_v_first, bool,
                                                bool, int64_t prepared_bytes) {
  const Shape s = check_halves(q, k, v, g, gv, initial_state, state_v_first);
  c10::SymInt channels = s.K * s.V;
  if (given(g)) channels += s.K;
  if (given(gv)) channels += s.V;
  return {empty({s.B * s.H * channels}, q, s.accumulate), empty({prepared_bytes}, q, at::kByte)};
}

ForwardOutputs apply_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const OptionalTensor& g, const OptionalTensor& gv,
                          const OptionalTensor& initial_state, std::optional<double>,
                          bool output_final_state, bool state_v_first, bool, bool,
                          const at::Tensor&, int64_t segments) {
  const Shape s = check_halves(q, k, v, g, gv, initial_state, state_v_first);
  return {fresh_output(s, v),
          output_final_state ? boundary_state(s, q, state_v_first) : empty({0}, q, s.accumulate),
          empty({s.B, segments, s.H, s.K, s.V}, q, s.accumulate)};
}

std::tuple<at::Tensor, at::Tensor> summary_bwd_meta(
    const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const OptionalTensor& g, const OptionalTensor& gv, std::optional<double>,
    bool state_v_first, bool, const at::Tensor&, int64_t prepared_bytes) {
  const OptionalTensor none;
  const Shape s = check_chunk_gla_bwd(
      {d_o, dht, q, k, v, g, gv, none, none, std::nullopt, state_v_first, false, none});
  return {boundary_state(s, q, false), empty({prepared_bytes}, q, at::kByte)};
}

std::tuple<at::Tensor, at::Tensor> fold_meta(const FoldArguments& a) {
  check_chunk_gla_fold(a);
  const auto dtype = a.summaries.scalar_type();
  return {empty(a.x_sizes(), a.summaries, dtype),
          a.backwards() ? empty({0}, a.summaries, dtype)
                        : empty({a.size, a.decays_each()}, a.summaries, dtype)};
}

BackwardOutputs apply_bwd_meta(const at::Tensor& d_o, const OptionalTensor& dht,
                               const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& g, const OptionalTensor& gv,
                               const OptionalTensor& initial_state, std::optional<double>,
                               bool state_v_first, bool, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&) {
  const OptionalTensor none;
  const Shape s = check_chunk_gla_bwd(
      {d_o, dht, q, k, v, g, gv, initial_state, none, std::nullopt, state_v_first, false, none});
  return {fresh(q),
          fresh(k),
          fresh(v),
          gate_grad(g, q, s),
          gate_grad(gv, q, s),
          given(initial_state) ? boundary_state(s, q, state_v_first) : empty({0}, q, s.accumulate)};
}

RecurrentForwardOutputs recurrent_gla_fwd_meta(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
    const OptionalTensor& gv, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
    std::optional<double>, bool output_final_state, bool, bool state_v_first) {
  const Shape s = check_recurrent_fwd(q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  return {fresh_output(s, v),
          output_final_state ? boundary_state(s, q, state_v_first) : empty({0}, q, s.accumulate)};
}

BackwardOutputs recurrent_gla_bwd_meta(const at::Tensor& d_o, const OptionalTensor& dht,
                                       const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const OptionalTensor& gk,
                                       const OptionalTensor& gv,
                                       const OptionalTensor& initial_state,
                                       const OptionalTensor& cu_seqlens, std::optional<double>,
                                       bool, bool state_v_first) {
  const Shape s =
      check_recurrent_bwd(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  return {fresh(q),
          fresh(k),
          fresh(v),
          gate_grad(gk, q, s),
          gate_grad(gv, q, s),
          given(initial_state) ? boundary_state(s, q, state_v_first) : empty({0}, q, s.accumulate)};
}

at::Tensor recurrent_on_pool_meta(const RecurrentInputs& in, const PoolInputs& pool,
                                  std::optional<double>, bool) {
  const Shape s = check_pool(in, pool);
  return in.q != nullptr && pool.out == nullptr ? fresh_output(s, *in.v) : at::Tensor();
}

at::Tensor gate_cumsum_meta(const at::Tensor& g, const OptionalTensor& cu_seqlens) {
  const Shape s = check_gate_cumsum(g, cu_seqlens);
  return empty(g.sym_sizes(), g, s.accumulate);
}

std::tuple<at::Tensor, at::Tensor> chunk_states_meta(const at::Tensor& k, const at::Tensor& v,
                                                     const at::Tensor& b,
                                                     const OptionalTensor& initial_state,
                                                     const OptionalTensor& cu_seqlens,
                                                     bool state_v_first) {
  const Shape s = check_chunk_states(k, v, b, initial_state, cu_seqlens, state_v_first);
  return {chunk_states_like(s, k, s.accumulate), boundary_state(s, k, state_v_first)};
}

at::Tensor scores_off_diagonal_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                                    const OptionalTensor& cu_seqlens, std::optional<double>) {
  const Shape s = check_scores("_scores_off_diagonal", q, k, b, cu_seqlens);
  return empty({s.B, s.T, s.H, kChunk}, q, s.accumulate);
}

at::Tensor scores_diagonal_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                                const OptionalTensor& cu_seqlens, std::optional<double>) {
  const Shape s = check_scores("_scores_diagonal", q, k, b, cu_seqlens);
  return empty({s.B, s.T, s.H, kSubChunk}, q, s.accumulate);
}

at::Tensor output_meta(const at::Tensor& q, const at::Tensor& v, const at::Tensor& b,
                       const at::Tensor& A, const at::Tensor& A_diagonal, const at::Tensor& S,
                       const OptionalTensor& cu_seqlens, std::optional<double>) {
  check_output(q, v, b, A, A_diagonal, S, cu_seqlens);
  return fresh(v);
}

std::tuple<at::Tensor, at::Tensor> state_grads_meta(const at::Tensor& q, const at::Tensor& d_o,
                                                    const at::Tensor& b, const OptionalTensor& dht,
                                                    const OptionalTensor& cu_seqlens,
                                                    std::optional<double>, bool state_v_first) {
  const Shape s = check_state_grads(q, d_o, b, dht, cu_seqlens, state_v_first);
  return {chunk_states_like(s, q, s.accumulate), boundary_state(s, q, state_v_first)};
}

at::Tensor value_grads_meta(const at::Tensor& k, const at::Tensor& d_o, const at::Tensor& b,
                            const at::Tensor& A, const at::Tensor& A_diagonal, const at::Tensor& dS,
                            const OptionalTensor& cu_seqlens) {
  check_value_grads(k, d_o, b, A, A_diagonal, dS, cu_seqlens);
  return fresh(d_o);
}

at::Tensor score_grads_meta(const at::Tensor& d_o, const at::Tensor& v,
                            const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const Shape s = check_score_grads(d_o, v, cu_seqlens, scale);
  return empty({s.B, s.T, s.H, kChunk}, v, s.accumulate);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_grads_meta(const at::Tensor& q,
                                                                const at::Tensor& k,
                                                                const at::Tensor& b,
                                                                const at::Tensor& dA,
                                                                const OptionalTensor& cu_seqlens) {
  check_intra_grads(q, k, b, dA, cu_seqlens);
  return {fresh(b), fresh(b), fresh(b)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> merge_grads_meta(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& d_o,
    const at::Tensor& b, const at::Tensor& S, const at::Tensor& dS, const at::Tensor& dq,
    const at::Tensor& dk, const at::Tensor& dg, const OptionalTensor& cu_seqlens,
    std::optional<double>) {
  check_merge_grads(q, k, v, d_o, b, S, dS, dq, dk, dg, cu_seqlens);
  return {fresh(q), fresh(k), fresh(b)};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl("chunk_gla_fwd", positional<chunk_gla_fwd_meta>);
  m.impl("chunk_gla_bwd", positional<chunk_gla_bwd_meta>);
  m.impl("chunk_gla_", positional<chunk_gla_on_pool_meta>);
  m.impl("chunk_gla_.out", positional_out<chunk_gla_on_pool_meta>);
  m.impl("chunk_gla_summary", &summary_meta);
  m.impl("chunk_gla_apply", &apply_meta);
  m.impl("chunk_gla_summary_bwd", &summary_bwd_meta);
  m.impl("chunk_gla_apply_bwd", &apply_bwd_meta);
  m.impl("chunk_gla_fold", &halves::positional_fold<fold_meta>);
  m.impl("recurrent_gla_fwd", recurrent_gla_fwd_meta);
  m.impl("recurrent_gla_bwd", recurrent_gla_bwd_meta);
  RecurrentOnPool<recurrent_on_pool_meta>::register_in(m);
  m.impl("_gate_cumsum", gate_cumsum_meta);
  m.impl("_chunk_states", chunk_states_meta);
  m.impl("_scores_off_diagonal", scores_off_diagonal_meta);
  m.impl("_scores_diagonal", scores_diagonal_meta);
  m.impl("_output", output_meta);
  m.impl("_state_grads", state_grads_meta);
  m.impl("_value_grads", value_grads_meta);
  m.impl("_score_grads", score_grads_meta);
  m.impl("_intra_grads", intra_grads_meta);
  m.impl("_merge_grads", merge_grads_meta);
}

}  // namespace gla_ext
