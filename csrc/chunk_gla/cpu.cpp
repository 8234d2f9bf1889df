// chunk_gla on CPU: check, allocate, plan, run.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/heads.h"
#include "cpu/host/call.h"
#include "op.h"
#include "steps/op.h"

namespace gla_ext::cpu {
namespace {

void check_nothing_for_backward(const char* op, int64_t bytes) {
  TORCH_CHECK_NOT_IMPLEMENTED(bytes == 0, op,
                              ": expected nothing to be kept for backward on the CPU, got ", bytes,
                              " bytes");
}

ForwardOutputs chunk_gla_fwd_cpu(const ForwardArguments& a) {
  const Shape shape = check_chunk_gla_fwd(a);
  check_nothing_for_backward("chunk_gla",
                             check_for_backward_bytes("chunk_gla", a.for_backward_bytes));
  return with_call("chunk_gla", shape, a.cu_seqlens, a.scale, [&](auto& call) -> ForwardOutputs {
    using P = ProblemOf<decltype(call)>;
    call.problem.state_v_first = a.state_v_first;
    call.problem.past_alone = a.batch_invariant;
    call.tokens_of(&a.q, a.k, a.v, a.g, a.gv);
    call.input_state(&P::h0, a.initial_state);
    at::Tensor o = call.output(&P::o, call.problem.V, a.v, a.v.scalar_type());
    at::Tensor final_state = call.output_state(&P::ht, a.q, a.output_final_state);
    call.run_forward(a.q);
    return {o, final_state, at::empty({0}, a.q.options().dtype(at::kByte))};
  });
}

// batch_invariant has nothing to change here: gradients of a token depend on later ones anyway.
BackwardOutputs chunk_gla_bwd_cpu(const BackwardArguments& a) {
  const Shape shape = check_chunk_gla_bwd(a);
  if (given(a.for_backward)) check_nothing_for_backward("chunk_gla_bwd", a.for_backward->numel());
  const auto run = [&](auto& call) -> BackwardOutputs {
    using P = ProblemOf<decltype(call)>;
    const auto& kernels = cpu::kernels<typename P::Accumulate>();
    call.problem.state_v_first = a.state_v_first;
    call.tokens_of(&a.q, a.k, a.v, a.g, a.gv);
    call.inputs({{&P::d_o, a.d_o}});
    call.input_state(&P::h0, a.initial_state);
    call.input_state(&P::dht, a.dht);
    auto [dq, dk, dv, dg, dgv, dh0] = call.gradients(a.q, a.k, a.v, a.g, a.gv, a.initial_state);
    if (call.sweeps(/*backward=*/true)) {
      call.problem.S_dtype = dtype_of(chunk_states_dtype(a.q));
      call.run(kernels.backward_sweep, /*states_behind_workspace=*/true);
    } else {
      const at::Tensor S = call.output_chunk_states(a.q, chunk_states_dtype(a.q));
      call.run(kernels.state_pass);
      const at::Tensor dS = call.output_chunk_state_grads(a.q);
      call.run(kernels.state_grad_pass);
      call.run(kernels.backward_chunk);
    }
    dg = a.gate_gradient ? sum_over_channels(dg, a.g) : dg.new_empty({0}, shape.accumulate);
    return with_shared_heads({dq, dk, dv, dg, dgv, dh0}, a.k.size(2));
  };
  return with_call("chunk_gla_bwd", shape, a.cu_seqlens, a.scale, run);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("chunk_gla_fwd", by_arguments<chunk_gla_fwd, chunk_gla_fwd_cpu>);
  m.impl("chunk_gla_bwd", by_arguments<chunk_gla_bwd, chunk_gla_bwd_cpu>);
}

}  // namespace gla_ext::cpu
