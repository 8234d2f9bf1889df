// The ten steps as operators of their own: each takes its inputs from memory and gives its
// intermediate back, in fp32.
#include <torch/library.h>

#include "cuda/host/call.h"
#include "op.h"
#include "ops.h"

namespace gla_ext::cuda {
namespace {

at::Tensor gate_cumsum_cuda(const at::Tensor& g, const OptionalTensor& cu_seqlens) {
  const Shape shape = check_gate_cumsum(g, cu_seqlens);
  Call call("_gate_cumsum", shape, g, cu_seqlens, 1.0);
  Problem& p = call.problem;
  call.input(p.g, g);
  at::Tensor b = call.output(p.b, p.K, at::kFloat);
  call.run_step({Kernel::kGateCumsum});
  return b;
}

std::tuple<at::Tensor, at::Tensor> chunk_states_cuda(const at::Tensor& k, const at::Tensor& v,
                                                     const at::Tensor& b,
                                                     const OptionalTensor& initial_state,
                                                     const OptionalTensor& cu_seqlens,
                                                     bool state_v_first) {
  const Shape shape = check_chunk_states(k, v, b, initial_state, cu_seqlens, state_v_first);
  Call call("_chunk_states", shape, k, cu_seqlens, 1.0);
  Problem& p = call.problem;
  p.state_v_first = state_v_first;
  call.input(p.k, k);
  call.input(p.v, v);
  call.input(p.b, b);
  p.h0 = call.input_state(initial_state);
  at::Tensor S = call.output_chunk_states(p.S, p.S_dtype, at::kFloat);
  at::Tensor final_state = call.output_state(p.ht);
  call.run_step({Kernel::kChunkStates});
  return {S, final_state};
}

at::Tensor scores_off_diagonal_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                                    const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const char* op = "_scores_off_diagonal";
  Call call(op, check_scores(op, q, k, b, cu_seqlens), q, cu_seqlens, scale);
  Problem& p = call.problem;
  call.input(p.q, q);
  call.input(p.k, k);
  call.input(p.b, b);
  at::Tensor A = call.output(p.A, kChunk, at::kFloat);
  call.run_step({Kernel::kChunkTiers, Kernel::kScoresOffDiagonal, Kernel::kStrongScoresOffDiagonal},
                /*tiers=*/true);
  return A;
}

at::Tensor scores_diagonal_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                                const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const char* op = "_scores_diagonal";
  Call call(op, check_scores(op, q, k, b, cu_seqlens), q, cu_seqlens, scale);
  Problem& p = call.problem;
  call.input(p.q, q);
  call.input(p.k, k);
  call.input(p.b, b);
  at::Tensor A_diagonal = call.output(p.A_diagonal, kSubChunk, at::kFloat);
  call.run_step({Kernel::kScoresDiagonal});
  return A_diagonal;
}

at::Tensor output_cuda(const at::Tensor& q, const at::Tensor& v, const at::Tensor& b,
                       const at::Tensor& A, const at::Tensor& A_diagonal, const at::Tensor& S,
                       const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const Shape shape = check_output(q, v, b, A, A_diagonal, S, cu_seqlens);
  Call call("_output", shape, q, cu_seqlens, scale);
  Problem& p = call.problem;
  call.input(p.q, q);
  call.input(p.v, v);
  call.input(p.b, b);
  call.input(p.A, A);
  call.input(p.A_diagonal, A_diagonal);
  call.input_chunk_states(p.S, p.S_dtype, S);
  at::Tensor o = call.output(p.o, p.V, v.scalar_type());
  call.run_step({Kernel::kOutput});
  return o;
}

std::tuple<at::Tensor, at::Tensor> state_grads_cuda(const at::Tensor& q, const at::Tensor& d_o,
                                                    const at::Tensor& b, const OptionalTensor& dht,
                                                    const OptionalTensor& cu_seqlens,
                                                    std::optional<double> scale,
                                                    bool state_v_first) {
  const Shape shape = check_state_grads(q, d_o, b, dht, cu_seqlens, state_v_first);
  Call call("_state_grads", shape, q, cu_seqlens, scale);
  Problem& p = call.problem;
  p.state_v_first = state_v_first;
  call.input(p.q, q);
  call.input(p.d_o, d_o);
  call.input(p.b, b);
  p.dht = call.input_state(dht);
  at::Tensor dS = call.output_chunk_states(p.dS, p.dS_dtype, at::kFloat);
  at::Tensor dh0 = call.output_state(p.dh0);
  call.run_step({Kernel::kStateGrads});
  return {dS, dh0};
}

at::Tensor value_grads_cuda(const at::Tensor& k, const at::Tensor& d_o, const at::Tensor& b,
                            const at::Tensor& A, const at::Tensor& A_diagonal, const at::Tensor& dS,
                            const OptionalTensor& cu_seqlens) {
  const Shape shape = check_value_grads(k, d_o, b, A, A_diagonal, dS, cu_seqlens);
  Call call("_value_grads", shape, k, cu_seqlens, 1.0);
  Problem& p = call.problem;
  call.input(p.k, k);
  call.input(p.d_o, d_o);
  call.input(p.b, b);
  call.input(p.A, A);
  call.input(p.A_diagonal, A_diagonal);
  call.input_chunk_states(p.dS, p.dS_dtype, dS);
  at::Tensor dv = call.output(p.dv, p.V, d_o.scalar_type());
  call.run_step({Kernel::kValueGrads});
  return dv;
}

at::Tensor score_grads_cuda(const at::Tensor& d_o, const at::Tensor& v,
                            const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const Shape shape = check_score_grads(d_o, v, cu_seqlens, scale);
  Call call("_score_grads", shape, v, cu_seqlens, scale);
  Problem& p = call.problem;
  call.input(p.d_o, d_o);
  call.input(p.v, v);
  at::Tensor dA = call.output(p.dA, kChunk, at::kFloat);
  call.run_step({Kernel::kScoreGrads});
  return dA;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_grads_cuda(const at::Tensor& q,
                                                                const at::Tensor& k,
                                                                const at::Tensor& b,
                                                                const at::Tensor& dA,
                                                                const OptionalTensor& cu_seqlens) {
  Call call("_intra_grads", check_intra_grads(q, k, b, dA, cu_seqlens), q, cu_seqlens, 1.0);
  Problem& p = call.problem;
  call.input(p.q, q);
  call.input(p.k, k);
  call.input(p.b, b);
  call.input(p.dA, dA);
  at::Tensor dq = call.output(p.dq_intra, p.K, at::kFloat);
  at::Tensor dk = call.output(p.dk_intra, p.K, at::kFloat);
  at::Tensor dg = call.output(p.dg_intra, p.K, at::kFloat);
  call.run_step({Kernel::kChunkTiers, Kernel::kIntraGrads, Kernel::kStrongIntraGrads},
                /*tiers=*/true);
  return {dq, dk, dg};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> merge_grads_cuda(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& d_o,
    const at::Tensor& b, const at::Tensor& S, const at::Tensor& dS, const at::Tensor& dq_intra,
    const at::Tensor& dk_intra, const at::Tensor& dg_intra, const OptionalTensor& cu_seqlens,
    std::optional<double> scale) {
  const Shape shape =
      check_merge_grads(q, k, v, d_o, b, S, dS, dq_intra, dk_intra, dg_intra, cu_seqlens);
  Call call("_merge_grads", shape, q, cu_seqlens, scale);
  Problem& p = call.problem;
  call.input(p.q, q);
  call.input(p.k, k);
  call.input(p.v, v);
  call.input(p.d_o, d_o);
  call.input(p.b, b);
  call.input(p.dq_intra, dq_intra);
  call.input(p.dk_intra, dk_intra);
  call.input(p.dg_intra, dg_intra);
  call.input_chunk_states(p.S, p.S_dtype, S);
  call.input_chunk_states(p.dS, p.dS_dtype, dS);
  at::Tensor dq = call.output(p.dq, p.K, q.scalar_type());
  at::Tensor dk = call.output(p.dk, p.K, k.scalar_type());
  at::Tensor dg = call.output(p.dg, p.K, at::kFloat);
  call.run_step({Kernel::kMergeGrads});
  return {dq, dk, dg};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("_gate_cumsum", gate_cumsum_cuda);
  m.impl("_chunk_states", chunk_states_cuda);
  m.impl("_scores_off_diagonal", scores_off_diagonal_cuda);
  m.impl("_scores_diagonal", scores_diagonal_cuda);
  m.impl("_output", output_cuda);
  m.impl("_state_grads", state_grads_cuda);
  m.impl("_value_grads", value_grads_cuda);
  m.impl("_score_grads", score_grads_cuda);
  m.impl("_intra_grads", intra_grads_cuda);
  m.impl("_merge_grads", merge_grads_cuda);
}

}  // namespace gla_ext::cuda
