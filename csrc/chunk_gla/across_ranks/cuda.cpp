// The halves of chunk_gla on CUDA. On the fused path the second uses results of the first;
// otherwise each is a pass of its own.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "common/groups.h"
#include "cuda/host/call.h"
#include "cuda/host/tensors.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

bool may_share(const at::Tensor& q, const OptionalTensor& g, const OptionalTensor& gv) {
  return q.scalar_type() == at::kBFloat16 && given(g) && !given(gv) && q.numel() > 0;
}

Shape check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
            const OptionalTensor& gv, const OptionalTensor& initial_state, bool state_v_first) {
  const OptionalTensor none;
  return check_chunk_gla_fwd(
      {q, k, v, g, gv, initial_state, none, std::nullopt, false, state_v_first, false, 0});
}

Shape check_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
                const OptionalTensor& gv, const OptionalTensor& initial_state, bool state_v_first) {
  const OptionalTensor none;
  return check_chunk_gla_bwd(
      {d_o, dht, q, k, v, g, gv, initial_state, none, std::nullopt, state_v_first, false, none});
}

void take_inputs(Call& call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const OptionalTensor& g, const at::Tensor* d_o = nullptr) {
  call.align_inputs();
  Problem& p = call.problem;
  p.whole_scores = true;
  call.input(p.q, q);
  call.input(p.k, k);
  call.input(p.v, v);
  if (d_o != nullptr) call.input(p.d_o, *d_o);
  call.input_gates(g, {});
}

at::Tensor fp32(const at::Tensor& like, at::IntArrayRef sizes) {
  return at::empty(sizes, like.options().dtype(at::kFloat));
}
at::Tensor bytes(const at::Tensor& like, int64_t size) {
  return at::empty({size}, like.options().dtype(at::kByte));
}

std::tuple<at::Tensor, at::Tensor> summary_cuda(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
    const OptionalTensor& gv, const OptionalTensor& initial_state, std::optional<double> scale,
    bool state_v_first, bool batch_invariant, bool for_backward, int64_t prepared_bytes) {
  const auto whole = [&] {
    return halves::summary(q, k, v, g, gv, initial_state, scale, state_v_first, batch_invariant,
                           for_backward, prepared_bytes);
  };
  if (!may_share(q, g, gv)) return whole();
  Call call("chunk_gla_summary", check(q, k, v, g, gv, initial_state, state_v_first), q, {}, scale);
  take_inputs(call, q, k, v, g);
  const CallPlan plan = call.plan(batch_invariant, for_backward, /*in_halves=*/true);
  if (plan.path != Path::kFused) return whole();
  Problem& p = call.problem;
  p.state_v_first = state_v_first;
  p.h0 = call.input_state(initial_state);
  const int64_t decays = p.grid.B * p.H * p.K, states = decays * p.V;
  at::Tensor summary = fp32(q, {states + decays});
  p.folded = summary.mutable_data_ptr<float>();
  p.folded_decays = p.folded + states;
  const int64_t size = plan.forward.summary.bytes();
  const at::Tensor left = bytes(q, size);
  call.run_summary(plan.forward, left);
  return {summary, size == prepared_bytes ? left : bytes(q, prepared_bytes)};
}

ForwardOutputs apply_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const OptionalTensor& g, const OptionalTensor& gv,
                          const OptionalTensor& initial_state, std::optional<double> scale,
                          bool output_final_state, bool state_v_first, bool batch_invariant,
                          bool for_backward, const at::Tensor& prepared, int64_t segments) {
  const auto whole = [&] {
    return halves::apply(q, k, v, g, gv, initial_state, scale, output_final_state, state_v_first,
                         batch_invariant, for_backward, prepared, segments);
  };
  if (!may_share(q, g, gv) || prepared.numel() == 0) return whole();
  Call call("chunk_gla_apply", check(q, k, v, g, gv, initial_state, state_v_first), q, {}, scale);
  take_inputs(call, q, k, v, g);
  const CallPlan plan = call.plan(batch_invariant, for_backward, /*in_halves=*/true);
  if (plan.path != Path::kFused || plan.forward.summary.bytes() != prepared.numel() ||
      plan.forward.segments.segments != segments)
    return whole();
  Problem& p = call.problem;
  p.state_v_first = state_v_first;
  p.h0 = call.input_state(initial_state);
  at::Tensor o = call.output(p.o, p.V, q.scalar_type());
  at::Tensor final_state =
      output_final_state ? call.output_state(p.ht) : call.not_asked_for(at::kFloat);
  at::Tensor entering = fp32(q, {q.size(0), segments, q.size(2), q.size(3), v.size(3)});
  p.segment_states = entering.mutable_data_ptr<float>();
  call.run_rest(plan.forward, prepared);
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

std::tuple<at::Tensor, at::Tensor> summary_bwd_cuda(
    const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const OptionalTensor& g, const OptionalTensor& gv,
    std::optional<double> scale, bool state_v_first, bool batch_invariant,
    const at::Tensor& prepared, int64_t prepared_bytes) {
  const auto whole = [&] {
    return halves::summary_bwd(d_o, dht, q, k, v, g, gv, scale, state_v_first, batch_invariant,
                               prepared, prepared_bytes);
  };
  if (!may_share(q, g, gv)) return whole();
  Call call("chunk_gla_summary_bwd", check_bwd(d_o, dht, q, k, v, g, gv, {}, state_v_first), q, {},
            scale);
  take_inputs(call, q, k, v, g, &d_o);
  const CallPlan plan = plan_backward(call, batch_invariant, prepared);
  if (plan.path != Path::kFused) return whole();
  Problem& p = call.problem;
  p.state_v_first = state_v_first;
  p.dht = call.input_state(dht);
  at::Tensor state_grad = fp32(q, {q.size(0), q.size(2), q.size(3), v.size(3)});
  p.folded = state_grad.mutable_data_ptr<float>();
  const int64_t size = plan.backward.summary.bytes();
  const at::Tensor left = bytes(q, size);
  call.run_summary(plan.backward, left);
  return {state_grad, size == prepared_bytes ? left : bytes(q, prepared_bytes)};
}

BackwardOutputs apply_bwd_cuda(const at::Tensor& d_o, const OptionalTensor& dht,
                               const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& g, const OptionalTensor& gv,
                               const OptionalTensor& initial_state, std::optional<double> scale,
                               bool state_v_first, bool batch_invariant, const at::Tensor& prepared,
                               const at::Tensor& entering, const at::Tensor& prepared_bwd) {
  const auto whole = [&] {
    return halves::apply_bwd(d_o, dht, q, k, v, g, gv, initial_state, scale, state_v_first,
                             batch_invariant, prepared, entering, prepared_bwd);
  };
  if (!may_share(q, g, gv) || prepared_bwd.numel() == 0) return whole();
  Call call("chunk_gla_apply_bwd",
            check_bwd(d_o, dht, q, k, v, g, gv, initial_state, state_v_first), q, {}, scale);
  take_inputs(call, q, k, v, g, &d_o);
  const CallPlan plan = plan_backward(call, batch_invariant, prepared);
  if (plan.path != Path::kFused || plan.backward.summary.bytes() != prepared_bwd.numel())
    return whole();
  Problem& p = call.problem;
  p.state_v_first = state_v_first;
  p.h0 = call.input_state(initial_state);
  p.dht = call.input_state(dht);
  if (plan.for_backward.has(Buffer::kSegmentStates))
    p.segment_states = const_cast<float*>(entering.const_data_ptr<float>());
  at::Tensor dq = call.output(p.dq, p.K, q.scalar_type());
  at::Tensor dk = call.output(p.dk, p.K, q.scalar_type());
  at::Tensor dv = call.output(p.dv, p.V, q.scalar_type());
  at::Tensor dg = call.gate_grad(p.dg, p.K, g);
  at::Tensor dh0 = given(initial_state) ? call.output_state(p.dh0) : call.not_asked_for(at::kFloat);
  p.dq_intra = p.dq;
  p.dk_intra = p.dk;
  p.dg_intra = p.dg;
  call.run_rest(plan.backward, prepared_bwd);
  return with_shared_heads({dq, dk, dv, dg, call.not_asked_for(at::kFloat), dh0}, k.size(2));
}

std::tuple<at::Tensor, at::Tensor> fold_cuda(const FoldArguments& a) {
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
  m.impl("chunk_gla_summary", &summary_cuda);
  m.impl("chunk_gla_apply", &apply_cuda);
  m.impl("chunk_gla_summary_bwd", &summary_bwd_cuda);
  m.impl("chunk_gla_apply_bwd", &apply_bwd_cuda);
  m.impl("chunk_gla_fold", &halves::positional_fold<fold_cuda>);
}

}  // namespace gla_ext::cuda
