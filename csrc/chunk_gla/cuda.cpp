// chunk_gla on CUDA: check, plan, allocate, launch.
#include <torch/library.h>

#include "common/groups.h"
#include "common/head_gates.h"
#include "cuda/host/call.h"
#include "cuda/host/tensors.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

bool runs_in_fp32(const Shape& shape, const OptionalTensor& gv) {
  return shape.dtype != at::kDouble && becomes_fp32(dtype_of(shape.dtype), given(gv));
}
at::Tensor back_to_fp16(const at::Tensor& t, bool in_fp32) { return in_fp32 ? t.to(at::kHalf) : t; }

// The inputs of both passes, and do in backward.
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

ForwardOutputs chunk_gla_fwd_cuda(const ForwardArguments& a) {
  Shape shape = check_chunk_gla_fwd(a);
  const bool in_fp32 = runs_in_fp32(shape, a.gv);
  if (in_fp32) shape.dtype = at::kFloat;
  Call call("chunk_gla", shape, a.q, a.cu_seqlens, a.scale);
  Problem& p = call.problem;
  p.tf32 |= in_fp32;
  const int64_t for_backward_bytes = check_for_backward_bytes("chunk_gla", a.for_backward_bytes);
  if (for_backward_bytes > 0) call.align_inputs();
  take_inputs(call, a, shape.dtype);
  at::Tensor o = call.output(p.o, p.V, shape.dtype);
  at::Tensor final_state =
      a.output_final_state ? call.output_state(p.ht) : call.not_asked_for(at::kFloat);
  CallPlan plan = call.plan(a.batch_invariant, /*for_backward=*/for_backward_bytes > 0);
  at::Tensor for_backward = call.output_for_backward(plan, for_backward_bytes);
  if (plan.for_backward.bytes() != for_backward_bytes)
    plan = call.plan(a.batch_invariant, /*for_backward=*/false);
  call.run(plan.forward);
  return {back_to_fp16(o, in_fp32), final_state, for_backward};
}

BackwardOutputs chunk_gla_bwd_cuda(const BackwardArguments& a) {
  Shape shape = check_chunk_gla_bwd(a);
  const bool in_fp32 = runs_in_fp32(shape, a.gv);
  if (in_fp32) shape.dtype = at::kFloat;
  Call call("chunk_gla_bwd", shape, a.q, a.cu_seqlens, a.scale);
  Problem& p = call.problem;
  p.tf32 |= in_fp32;
  const bool has_for_backward = given(a.for_backward) && a.for_backward->numel() > 0;
  if (has_for_backward) call.align_inputs();
  take_inputs(call, a, shape.dtype, &a.d_o);
  call.gate_gradient = a.gate_gradient;
  p.dht = call.input_state(a.dht);
  at::Tensor dq = call.output(p.dq, p.K, shape.dtype);
  at::Tensor dk = call.output(p.dk, p.K, shape.dtype);
  at::Tensor dv = call.output(call.value_gated ? call.value_side.dk : p.dv, p.V, shape.dtype);
  CallPlan plan = call.plan(a.batch_invariant, /*for_backward=*/has_for_backward);
  if (has_for_backward && !call.input_for_backward(plan, *a.for_backward))
    plan = call.plan(a.batch_invariant, /*for_backward=*/false);
  // Kernels for a gate per channel always write dg, even if it is not wanted.
  const bool reads_head_gates = plan.backward.reads_head_gates;
  at::Tensor dg =
                 reads_head_gates ? call.head_gate_grad(p.dg, a.g) : call.gate_grad(p.dg, p.K, a.g),
             dgv = call.gate_grad(call.value_side.dg, p.V, a.gv);
  at::Tensor dh0 =
      given(a.initial_state) ? call.output_state(p.dh0) : call.not_asked_for(at::kFloat);
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
  return with_shared_heads({back_to_fp16(dq, in_fp32), back_to_fp16(dk, in_fp32),
                            back_to_fp16(dv, in_fp32), dg, dgv, dh0},
                           a.k.size(2));
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("chunk_gla_fwd", by_arguments<chunk_gla_fwd, chunk_gla_fwd_cuda>);
  m.impl("chunk_gla_bwd", by_arguments<chunk_gla_bwd, chunk_gla_bwd_cuda>);
}

}  // namespace gla_ext::cuda
