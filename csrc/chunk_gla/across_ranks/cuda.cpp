// The halves of chunk_gla on CUDA. On the fused path the second uses results of the first;
// otherwise each is a pass of its own.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "common/heads.h"
#include "cuda/host/call.h"
#include "cuda/host/tensors.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

template <class Arguments>
bool may_share(const Arguments& a) {
  return a.q.scalar_type() == at::kBFloat16 && given(a.g) && !given(a.gv) && a.q.numel() > 0;
}

at::Tensor fp32(const at::Tensor& like, at::IntArrayRef sizes) {
  return at::empty(sizes, like.options().dtype(at::kFloat));
}
at::Tensor bytes(const at::Tensor& like, int64_t size) {
  return at::empty({size}, like.options().dtype(at::kByte));
}

// Runs the first half of a pass. Returns what it leaves for the second half if that has the size
// that the caller expects, else an unused tensor of that size.
at::Tensor run_summary(Call& call, const PassPlan& pass, const at::Tensor& q,
                       int64_t prepared_bytes) {
  const int64_t size = pass.summary.bytes();
  const at::Tensor left = bytes(q, size);
  call.run_summary(pass, left);
  return size == prepared_bytes ? left : bytes(q, prepared_bytes);
}

TwoTensors summary_cuda(const SummaryArguments& a) {
  if (!may_share(a)) return halves::summary(a);
  Call call("chunk_gla_summary", check_chunk_gla_fwd(whole(a)), a.q, {}, a.scale);
  call.align_inputs();
  call.inputs(a);
  const CallPlan plan = call.plan(a.batch_invariant, a.for_backward, /*in_halves=*/true);
  if (plan.path != Path::kFused) return halves::summary(a);
  Problem& p = call.problem;
  p.h0 = call.input_state(a.initial_state);
  const int64_t decays = p.grid.B * p.H * p.K, states = decays * p.V;
  at::Tensor summary = fp32(a.q, {states + decays});
  p.folded = summary.mutable_data_ptr<float>();
  p.folded_decays = p.folded + states;
  return {summary, run_summary(call, plan.forward, a.q, a.prepared_bytes)};
}

ForwardOutputs apply_cuda(const ApplyArguments& a) {
  if (!may_share(a) || a.prepared.numel() == 0) return halves::apply(a);
  Call call("chunk_gla_apply", check_chunk_gla_fwd(whole(a)), a.q, {}, a.scale);
  call.align_inputs();
  call.inputs(a);
  const CallPlan plan = call.plan(a.batch_invariant, a.for_backward, /*in_halves=*/true);
  if (plan.path != Path::kFused || plan.forward.summary.bytes() != a.prepared.numel() ||
      plan.forward.segments.segments != a.segments)
    return halves::apply(a);
  Problem& p = call.problem;
  p.h0 = call.input_state(a.initial_state);
  at::Tensor o = call.output(p.o, p.V, call.dtype);
  at::Tensor final_state = call.output_state_if(a.output_final_state, p.ht);
  at::Tensor entering = fp32(a.q, {p.grid.B, a.segments, p.H, p.K, p.V});
  p.segment_states = entering.mutable_data_ptr<float>();
  call.run_rest(plan.forward, a.prepared);
  return {o, final_state, entering};
}

// The plan of backward. If what forward has left has the plan's size, it is put in its place.
CallPlan plan_backward(Call& call, bool batch_invariant, const at::Tensor& prepared) {
  if (prepared.numel() > 0) {
    CallPlan plan = call.plan(batch_invariant, /*for_backward=*/true, /*in_halves=*/true);
    if (call.input_for_backward(plan, prepared)) return plan;
  }
  return call.plan(batch_invariant, /*for_backward=*/false, /*in_halves=*/true);
}

TwoTensors summary_bwd_cuda(const SummaryBackwardArguments& a) {
  if (!may_share(a)) return halves::summary_bwd(a);
  Call call("chunk_gla_summary_bwd", check_chunk_gla_bwd(whole(a, kAbsent)), a.q, {}, a.scale);
  call.align_inputs();
  call.inputs(a, &a.d_o);
  const CallPlan plan = plan_backward(call, a.batch_invariant, a.prepared);
  if (plan.path != Path::kFused) return halves::summary_bwd(a);
  Problem& p = call.problem;
  p.dht = call.input_state(a.dht);
  at::Tensor state_grad = fp32(a.q, {p.grid.B, p.H, p.K, p.V});
  p.folded = state_grad.mutable_data_ptr<float>();
  return {state_grad, run_summary(call, plan.backward, a.q, a.prepared_bytes)};
}

BackwardOutputs apply_bwd_cuda(const ApplyBackwardArguments& a) {
  if (!may_share(a) || a.prepared_bwd.numel() == 0) return halves::apply_bwd(a);
  Call call("chunk_gla_apply_bwd", check_chunk_gla_bwd(whole(a)), a.q, {}, a.scale);
  call.align_inputs();
  call.inputs(a, &a.d_o);
  const CallPlan plan = plan_backward(call, a.batch_invariant, a.prepared);
  if (plan.path != Path::kFused || plan.backward.summary.bytes() != a.prepared_bwd.numel())
    return halves::apply_bwd(a);
  Problem& p = call.problem;
  p.h0 = call.input_state(a.initial_state);
  p.dht = call.input_state(a.dht);
  if (plan.for_backward.has(Buffer::kSegmentStates))
    p.segment_states = const_cast<float*>(a.entering.const_data_ptr<float>());
  at::Tensor dq = call.output(p.dq, p.K, call.dtype);
  at::Tensor dk = call.output(p.dk, p.K, call.dtype);
  at::Tensor dv = call.output(p.dv, p.V, call.dtype);
  at::Tensor dg = call.gate_grad(p.dg, p.K, a.g);
  at::Tensor dh0 = call.output_state_if(given(a.initial_state), p.dh0);
  p.dq_intra = p.dq;
  p.dk_intra = p.dk;
  p.dg_intra = p.dg;
  call.run_rest(plan.backward, a.prepared_bwd);
  return with_shared_heads({dq, dk, dv, dg, call.not_asked_for(at::kFloat), dh0}, a.k.size(2));
}

TwoTensors fold_cuda(const FoldArguments& a) {
  check_gpu("chunk_gla_fold", a.summaries.device());
  check_not_fp64("chunk_gla_fold", a.summaries.scalar_type());
  const c10::cuda::CUDAGuard guard(a.summaries.device());
  const halves::FoldTensors tensors(a);
  fold_ranks(tensors.problem<float>(), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {tensors.x, tensors.kept};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  register_halves<summary_cuda, apply_cuda, summary_bwd_cuda, apply_bwd_cuda, fold_cuda>(m);
}

}  // namespace gla_ext::cuda
