// chunk_gla on CPU: check, allocate, plan, run.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/groups.h"
#include "common/head_gates.h"
#include "cpu/host/call.h"
#include "cpu/host/plan.h"
#include "op.h"
#include "steps/op.h"

namespace gla_ext::cpu {
namespace {

at::Tensor not_asked_for(const at::Tensor& like, at::ScalarType dtype) {
  return at::empty({0}, like.options().dtype(dtype));
}

void check_nothing_for_backward(const char* op, int64_t bytes) {
  TORCH_CHECK_NOT_IMPLEMENTED(bytes == 0, op,
                              ": expected nothing to be kept for backward on the CPU, got ", bytes,
                              " bytes");
}

template <typename T>
bool sweeps(const Call<T>& call, bool backward) {
  const auto& p = call.problem;
  return make_plan({call.N, call.tokens, p.H, p.K, p.V, call.packed, backward}, available_threads())
             .mode == Mode::kSweep;
}

// Both modes multiply the same operands in the same order, so batch_invariant has nothing to change
// here.
ForwardOutputs chunk_gla_fwd_cpu(const ForwardArguments& a) {
  const Shape shape = check_chunk_gla_fwd(a);
  check_nothing_for_backward("chunk_gla",
                             check_for_backward_bytes("chunk_gla", a.for_backward_bytes));
  return with_call("chunk_gla", shape, a.cu_seqlens, a.scale, [&](auto& call) -> ForwardOutputs {
    using T = typename std::remove_reference_t<decltype(call)>::Accumulate;
    using P = Problem<T>;
    call.problem.state_v_first = a.state_v_first;
    call.inputs({{&P::q, a.q}, {&P::k, a.k}, {&P::v, a.v}});
    call.gates(a.g, a.gv);
    call.input_state(&P::h0, a.initial_state);
    at::Tensor o = call.output(&P::o, call.problem.V, a.v, a.v.scalar_type());
    at::Tensor final_state = a.output_final_state ? call.output_state(&P::ht, a.q)
                                                  : not_asked_for(a.q, shape.accumulate);
    if (sweeps(call, /*backward=*/false)) {
      call.run(kernels<T>().forward_sweep);
    } else {
      const at::Tensor S = call.output_chunk_states(a.q, chunk_states_dtype(a.q));
      call.run(kernels<T>().state_pass);
      call.run(kernels<T>().forward_chunk);
    }
    return {o, final_state, not_asked_for(a.q, at::kByte)};
  });
}

BackwardOutputs chunk_gla_bwd_cpu(const BackwardArguments& a) {
  const Shape shape = check_chunk_gla_bwd(a);
  if (given(a.for_backward)) check_nothing_for_backward("chunk_gla_bwd", a.for_backward->numel());
  const at::Tensor &q = a.q, &k = a.k, &v = a.v;
  return with_call("chunk_gla_bwd", shape, a.cu_seqlens, a.scale,
                   [&](auto& call) -> BackwardOutputs {
                     using T = typename std::remove_reference_t<decltype(call)>::Accumulate;
                     using P = Problem<T>;
                     auto& p = call.problem;
                     p.state_v_first = a.state_v_first;
                     call.inputs({{&P::q, q}, {&P::k, k}, {&P::v, v}, {&P::d_o, a.d_o}});
                     call.gates(a.g, a.gv);
                     call.input_state(&P::h0, a.initial_state);
                     call.input_state(&P::dht, a.dht);
                     at::Tensor dq = call.output(&P::dq, p.K, q, q.scalar_type());
                     at::Tensor dk = call.output(&P::dk, p.K, k, k.scalar_type());
                     at::Tensor dv = call.output(&P::dv, p.V, v, v.scalar_type());
                     at::Tensor dg = call.gate_grad(&P::dg, p.K, a.g, q);
                     at::Tensor dgv = call.gate_grad(&P::dgv, p.V, a.gv, q);
                     at::Tensor dh0 = given(a.initial_state) ? call.output_state(&P::dh0, q)
                                                             : not_asked_for(q, shape.accumulate);
                     if (sweeps(call, /*backward=*/true)) {
                       p.S_dtype = dtype_of(chunk_states_dtype(q));
                       call.run(kernels<T>().backward_sweep, /*states_behind_workspace=*/true);
                     } else {
                       const at::Tensor S = call.output_chunk_states(q, chunk_states_dtype(q));
                       call.run(kernels<T>().state_pass);
                       const at::Tensor dS = call.output_chunk_state_grads(q);
                       call.run(kernels<T>().state_grad_pass);
                       call.run(kernels<T>().backward_chunk);
                     }
                     dg = sum_over_channels(dg, a.g);
                     if (!a.gate_gradient) dg = not_asked_for(q, shape.accumulate);
                     return with_shared_heads({dq, dk, dv, dg, dgv, dh0}, k.size(2));
                   });
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("chunk_gla_fwd", positional<chunk_gla_fwd_cpu>);
  m.impl("chunk_gla_bwd", positional<chunk_gla_bwd_cpu>);
}

}  // namespace gla_ext::cpu
