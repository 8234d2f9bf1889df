// chunk_gla on CUDA: check, plan, allocate, launch.
#include <torch/library.h>

#include "common/heads.h"
#include "cuda/host/call.h"
#include "cuda/host/tensors.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

at::Tensor back_to_fp16(const at::Tensor& t, const Call& call) {
  return call.fp16_in_fp32 ? t.to(at::kHalf) : t;
}

ForwardOutputs chunk_gla_fwd_cuda(const ForwardArguments& a) {
  Call call("chunk_gla", check_chunk_gla_fwd(a), a.q, a.cu_seqlens, a.scale, given(a.gv));
  Problem& p = call.problem;
  const int64_t for_backward_bytes = check_for_backward_bytes("chunk_gla", a.for_backward_bytes);
  if (for_backward_bytes > 0) call.align_inputs();
  call.inputs(a);
  p.past_alone = a.batch_invariant;
  p.h0 = call.input_state(a.initial_state);
  at::Tensor o = call.output(p.o, p.V, call.dtype);
  at::Tensor final_state = call.output_state_if(a.output_final_state, p.ht);
  CallPlan plan = call.plan(a.batch_invariant, /*for_backward=*/for_backward_bytes > 0);
  at::Tensor for_backward = call.output_for_backward(plan, for_backward_bytes);
  if (plan.for_backward.bytes() != for_backward_bytes)
    plan = call.plan(a.batch_invariant, /*for_backward=*/false);
  call.run(plan.forward);
  return {back_to_fp16(o, call), final_state, for_backward};
}

BackwardOutputs chunk_gla_bwd_cuda(const BackwardArguments& a) {
  Call call("chunk_gla_bwd", check_chunk_gla_bwd(a), a.q, a.cu_seqlens, a.scale, given(a.gv));
  Problem& p = call.problem;
  const bool has_for_backward = given(a.for_backward) && a.for_backward->numel() > 0;
  if (has_for_backward) call.align_inputs();
  call.inputs(a, &a.d_o);
  p.h0 = call.input_state(a.initial_state);
  call.gate_gradient = a.gate_gradient;
  p.dht = call.input_state(a.dht);
  at::Tensor dq = call.output(p.dq, p.K, call.dtype);
  at::Tensor dk = call.output(p.dk, p.K, call.dtype);
  at::Tensor dv = call.output(call.value_gated ? call.value_side.dk : p.dv, p.V, call.dtype);
  CallPlan plan = call.plan(a.batch_invariant, /*for_backward=*/has_for_backward);
  if (has_for_backward && !call.input_for_backward(plan, *a.for_backward))
    plan = call.plan(a.batch_invariant, /*for_backward=*/false);
  // Kernels for a gate per channel always write dg, even if it is not wanted.
  const bool reads_head_gates = plan.backward.reads_head_gates;
  at::Tensor dg =
                 reads_head_gates ? call.head_gate_grad(p.dg, a.g) : call.gate_grad(p.dg, p.K, a.g),
             dgv = call.gate_grad(call.value_side.dg, p.V, a.gv);
  at::Tensor dh0 = call.output_state_if(given(a.initial_state), p.dh0);
  // merge_grads reads each element of these before it writes it, in the same block.
  for (Problem* side : {&p, &call.value_side}) {
    side->dq_intra = side->dq;
    side->dk_intra = side->dk;
    side->dg_intra = side->dg;
  }
  call.run(plan.backward);  // replaces those intra results that are not fp32
  if (!a.gate_gradient)
    dg = call.not_asked_for(at::kFloat);
  else
    dg = reads_head_gates && given(a.g) ? dg.squeeze(-1) : sum_over_channels(dg, a.g);
  return with_shared_heads(
      {back_to_fp16(dq, call), back_to_fp16(dk, call), back_to_fp16(dv, call), dg, dgv, dh0},
      a.k.size(2));
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("chunk_gla_fwd", by_arguments<chunk_gla_fwd, chunk_gla_fwd_cuda>);
  m.impl("chunk_gla_bwd", by_arguments<chunk_gla_bwd, chunk_gla_bwd_cuda>);
}

}  // namespace gla_ext::cuda
