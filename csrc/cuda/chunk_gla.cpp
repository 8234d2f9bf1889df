// chunk_gla on CUDA: check, plan, allocate, launch.
#include <torch/library.h>

#include "../groups.h"
#include "../ops.h"
#include "problem.h"
#include "sm90/sm90.h"
#include "tensors.h"

namespace gla_ext::cuda {
namespace {

bool widens(const Shape& shape, const OptionalTensor& gv) {
  return shape.dtype != at::kDouble && becomes_fp32(dtype_of(shape.dtype), given(gv));
}
at::Tensor narrowed(const at::Tensor& t, bool wide) { return wide ? t.to(at::kHalf) : t; }

// What both passes are given, and do in backward.
template <class Arguments>
void take_inputs(Call& call, const Arguments& a, at::ScalarType dtype,
                 const at::Tensor* d_o = nullptr) {
  Problem& p = call.problem;
  p.whole_scores = true;
  p.state_v_first = a.state_v_first;
  call.input(p.q, a.q, dtype);
  call.input(p.k, a.k, dtype);
  call.input(p.v, a.v, dtype);
  if (d_o != nullptr) call.input(p.d_o, *d_o, dtype);
  call.input_gates(a.g, a.gv);
  p.h0 = call.input_state(a.initial_state);
}

// What the sweeps of the fused path need: operands where they read these, unless forward has kept
// them, with A as far as it is read, and what enters each segment where sequences are cut into
// segments.
void prepare_sweeps(const Call& call, const Plan& plan, bool backward) {
  const Problem& p = call.problem;
  if (plan.paired_parts)
    call.launch(sm90::paired_segment_parts);
  else if (plan.linear && !p.operands_kept)
    call.launch(sm90::operands);
  if (plan.segment_states == 0) return;
  if (plan.paired_parts && !backward) return call.launch(sm90::scan_and_exact_scores);
  const bool has_states = plan.paired_parts || p.segment_states_kept;
  if (!plan.linear)
    call.launch(plan.packed_parts ? sm90::packed_segment_parts : sm90::segment_parts);
  else if (!has_states)
    call.launch(sm90::linear_segment_parts);
  else
    call.launch(sm90::linear_segment_grad_parts);
  call.launch(sm90::segment_scan);
}

// Step 1 of the gates that are there, and what gates on values make of v and do.
void prepare_gates(const Call& call) {
  if (call.key_gated) call.launch(gate_cumsum);
  if (!call.value_gated) return;
  call.launch_on_values(gate_cumsum);
  call.launch(value_operands);
}

// Backward from its third step on: what differs for keys, and the same for values.
void run_value_gated_backward(const Call& call) {
  call.launch(value_gated_states);
  call.launch(value_gated_state_grads);
  call.launch_on_values(scores_off_diagonal);
  call.launch_on_values(scores_diagonal);
  call.launch(intra_grads);
  call.launch_on_values(intra_grads);
  call.launch(value_gated_merge);
}

ForwardOutputs chunk_gla_fwd_cuda(const ForwardArguments& a) {
  Shape shape = check_chunk_gla_fwd(a);
  const bool wide = widens(shape, a.gv);
  if (wide) shape.dtype = at::kFloat;
  Call call("chunk_gla", shape, a.q, a.cu_seqlens, a.scale);
  Problem& p = call.problem;
  p.tf32 |= wide;
  const int64_t kept_bytes = check_kept_bytes("chunk_gla", a.kept_bytes);
  if (kept_bytes > 0) call.align_inputs();
  take_inputs(call, a, shape.dtype);
  at::Tensor o = call.output(p.o, p.V, shape.dtype);
  at::Tensor final_state =
      a.output_final_state ? call.output_state(p.ht) : call.not_asked_for(at::kFloat);
  const auto plan_with = [&](bool kept) {
    return call.plan(/*backward=*/false, a.batch_invariant, kept);
  };
  Plan plan = plan_with(kept_bytes > 0);
  at::Tensor kept = call.keep(plan, kept_bytes);
  if (plan.kept.bytes != kept_bytes) plan = plan_with(false);
  call.allocate(plan);

  if (plan.path == Path::kFused) {
    prepare_sweeps(call, plan, /*backward=*/false);
    call.launch(plan.linear               ? sm90::linear_forward
                : plan.cluster_pieces > 0 ? sm90::paired_forward
                                          : sm90::forward);
    if (!plan.linear) call.launch(sm90::exact_output);
    return {o, final_state, kept};
  }
  prepare_gates(call);
  if (call.value_gated)
    call.launch(value_gated_states);
  else
    call.launch(chunk_states);
  call.launch(scores_off_diagonal);
  call.launch(scores_diagonal);
  if (call.value_gated)
    call.launch(value_gated_output);
  else
    call.launch(output);
  return {narrowed(o, wide), final_state, kept};
}

// The fused path's kernels, or those of the steps in their order.
void run_backward(const Call& call, const Plan& plan) {
  if (plan.path == Path::kFused) {
    if (!plan.paired_states) prepare_sweeps(call, plan, /*backward=*/true);
    call.launch(plan.paired_states ? sm90::paired_states
                : plan.linear      ? sm90::linear_states
                                   : sm90::chunk_states);
    if (!plan.linear || plan.paired_states || plan.paired_parts || call.problem.operands_kept)
      call.launch(sm90::exact_gradients);
    call.launch(plan.paired_chunks      ? sm90::paired_gradients
                : !plan.swept_gradients ? sm90::gradients
                : plan.linear           ? sm90::gradient_sweep
                                        : sm90::narrow_gradient_sweep);
    return;
  }
  prepare_gates(call);
  call.launch(scores_off_diagonal);
  call.launch(scores_diagonal);
  if (call.value_gated) return run_value_gated_backward(call);
  call.launch(states_and_state_grads);
  call.launch(value_grads);
  call.launch(score_grads);
  call.launch(intra_grads);
  call.launch(merge_grads);
}

BackwardOutputs chunk_gla_bwd_cuda(const BackwardArguments& a) {
  Shape shape = check_chunk_gla_bwd(a);
  const bool wide = widens(shape, a.gv);
  if (wide) shape.dtype = at::kFloat;
  Call call("chunk_gla_bwd", shape, a.q, a.cu_seqlens, a.scale);
  Problem& p = call.problem;
  p.tf32 |= wide;
  const bool has_kept = given(a.kept) && a.kept->numel() > 0;
  if (has_kept) call.align_inputs();
  take_inputs(call, a, shape.dtype, &a.d_o);
  p.dht = call.input_state(a.dht);
  at::Tensor dq = call.output(p.dq, p.K, shape.dtype);
  at::Tensor dk = call.output(p.dk, p.K, shape.dtype);
  at::Tensor dv = call.output(call.value_gated ? call.values.dk : p.dv, p.V, shape.dtype);
  at::Tensor dg = call.gate_grad(p.dg, p.K, a.g), dgv = call.gate_grad(call.values.dg, p.V, a.gv);
  at::Tensor dh0 =
      given(a.initial_state) ? call.output_state(p.dh0) : call.not_asked_for(at::kFloat);
  // merge_grads reads an element of these before it writes it, and in no other block.
  for (Problem* side : {&p, &call.values}) {
    side->dq_intra = side->dq;
    side->dk_intra = side->dk;
    side->dg_intra = side->dg;
  }
  const auto plan_with = [&](bool uses_kept) {
    return call.plan(/*backward=*/true, a.batch_invariant, uses_kept);
  };
  Plan plan = plan_with(has_kept);
  if (has_kept && !call.input_kept(plan, *a.kept)) plan = plan_with(false);
  call.allocate(plan);  // replaces those not fp32
  p.grads_sum_decays = p.segment_states_kept && plan.kept.segment_decays == Workspace::kAbsent;
  run_backward(call, plan);
  return with_shared_heads(
      {narrowed(dq, wide), narrowed(dk, wide), narrowed(dv, wide), dg, dgv, dh0}, a.k.size(2));
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("chunk_gla_fwd", positional<chunk_gla_fwd_cuda>);
  m.impl("chunk_gla_bwd", positional<chunk_gla_bwd_cuda>);
}

}  // namespace gla_ext::cuda
