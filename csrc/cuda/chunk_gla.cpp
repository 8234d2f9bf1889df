// chunk_gla on CUDA: check, plan, allocate, launch.
#include <torch/library.h>

#include "../ops.h"
#include "problem.h"
#include "sm90/sm90.h"

namespace gla_ext::cuda {
namespace {

void check_gates(const char* op, const OptionalTensor& g, const OptionalTensor& gv) {
  TORCH_CHECK_NOT_IMPLEMENTED(given(g) && !given(gv), op,
                              ": expected gates g, and none on values (gv), on CUDA; "
                              "fused_recurrent_gla takes every combination");
}

// What the sweeps of the fused path need: operands where they read these, and what enters each
// segment where sequences are cut into segments.
void prepare_sweeps(const Call& call, const Plan& plan) {
  if (plan.linear) call.launch(sm90::operands);
  if (plan.segments == 0) return;
  call.launch(plan.linear ? sm90::linear_segment_parts : sm90::segment_parts);
  call.launch(sm90::segment_scan);
}

ForwardOutputs chunk_gla_fwd_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const OptionalTensor& g, const OptionalTensor& gv,
                                  const OptionalTensor& initial_state,
                                  const OptionalTensor& cu_seqlens, std::optional<double> scale,
                                  bool output_final_state, bool state_v_first, bool save_states,
                                  bool batch_invariant) {
  const Shape shape = check_chunk_gla_fwd(q, k, v, g, gv, initial_state, cu_seqlens, state_v_first);
  check_gates("chunk_gla", g, gv);
  Call call("chunk_gla", shape, q, cu_seqlens, scale);
  Problem& p = call.problem;
  p.state_v_first = state_v_first;
  p.whole_scores = true;
  call.input(p.q, q);
  call.input(p.k, k);
  call.input(p.v, v);
  call.input(p.g, *g);
  p.h0 = call.input_state(initial_state);
  at::Tensor o = call.output(p.o, p.V, v.scalar_type());
  at::Tensor final_state =
      output_final_state ? call.output_state(p.ht) : call.not_asked_for(at::kFloat);
  at::Tensor states = save_states ? call.output_chunk_states(p.S, p.S_dtype, saved_states_dtype(q))
                                  : call.not_asked_for(saved_states_dtype(q));
  const Plan plan = call.plan(/*backward=*/false, save_states, batch_invariant);
  call.allocate(plan);

  if (plan.path == Path::kFused) {
    prepare_sweeps(call, plan);
    call.launch(plan.linear ? sm90::linear_forward : sm90::forward);
    call.launch(sm90::exact_output);
    return {o, final_state, states};
  }
  call.launch(gate_cumsum);
  call.launch(chunk_states);
  call.launch(scores_off_diagonal);
  call.launch(scores_diagonal);
  call.launch(output);
  return {o, final_state, states};
}

BackwardOutputs chunk_gla_bwd_cuda(const at::Tensor& d_o, const OptionalTensor& dht,
                                   const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const OptionalTensor& g, const OptionalTensor& gv,
                                   const OptionalTensor& initial_state,
                                   const OptionalTensor& cu_seqlens, const at::Tensor& states,
                                   std::optional<double> scale, bool state_v_first,
                                   bool batch_invariant) {
  const Shape shape = check_chunk_gla_bwd(d_o, dht, q, k, v, g, gv, initial_state, cu_seqlens,
                                          states, state_v_first);
  check_gates("chunk_gla_bwd", g, gv);
  Call call("chunk_gla_bwd", shape, q, cu_seqlens, scale);
  Problem& p = call.problem;
  p.state_v_first = state_v_first;
  p.whole_scores = true;
  call.input(p.q, q);
  call.input(p.k, k);
  call.input(p.v, v);
  call.input(p.g, *g);
  call.input(p.d_o, d_o);
  p.h0 = call.input_state(initial_state);
  p.dht = call.input_state(dht);
  const bool saved = states.dim() != 1;
  if (saved) call.input_chunk_states(p.S, p.S_dtype, states);
  at::Tensor dq = call.output(p.dq, p.K, q.scalar_type());
  at::Tensor dk = call.output(p.dk, p.K, k.scalar_type());
  at::Tensor dv = call.output(p.dv, p.V, v.scalar_type());
  at::Tensor dg = call.output(p.dg, p.K, g->scalar_type());
  at::Tensor dh0 = given(initial_state) ? call.output_state(p.dh0) : call.not_asked_for(at::kFloat);
  // merge_grads reads an element of these before it writes it, and in no other block.
  p.dq_intra = p.dq;
  p.dk_intra = p.dk;
  p.dg_intra = p.dg;
  const Plan plan = call.plan(/*backward=*/true, saved, batch_invariant);
  call.allocate(plan);  // replaces those not fp32

  if (plan.path == Path::kFused) {
    if (plan.fused_sweeps) {
      prepare_sweeps(call, plan);
      call.launch(plan.linear ? sm90::linear_states : sm90::chunk_states);
    } else {
      call.launch(gate_cumsum);
      call.launch(saved ? state_grads : states_and_state_grads);
    }
    call.launch(sm90::exact_gradients);
    call.launch(sm90::gradients);
    return {dq, dk, dv, dg, call.not_asked_for(at::kFloat), dh0};
  }
  call.launch(gate_cumsum);
  call.launch(scores_off_diagonal);
  call.launch(scores_diagonal);
  call.launch(saved ? state_grads : states_and_state_grads);
  call.launch(value_grads);
  call.launch(score_grads);
  call.launch(intra_grads);
  call.launch(merge_grads);
  return {dq, dk, dv, dg, call.not_asked_for(at::kFloat), dh0};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("chunk_gla_fwd", chunk_gla_fwd_cuda);
  m.impl("chunk_gla_bwd", chunk_gla_bwd_cuda);
}

}  // namespace gla_ext::cuda
