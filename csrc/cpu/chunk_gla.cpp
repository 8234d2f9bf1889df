// chunk_gla on CPU: check, allocate, plan, run.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../groups.h"
#include "../ops.h"
#include "plan.h"
#include "problem.h"

namespace gla_ext::cpu {
namespace {

at::Tensor not_asked_for(const at::Tensor& like, at::ScalarType dtype) {
  return at::empty({0}, like.options().dtype(dtype));
}

void check_nothing_kept(const char* op, int64_t bytes) {
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
ForwardOutputs chunk_gla_fwd_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const OptionalTensor& g, const OptionalTensor& gv,
                                 const OptionalTensor& initial_state,
                                 const OptionalTensor& cu_seqlens, std::optional<double> scale,
                                 bool output_final_state, bool state_v_first, bool save_states,
                                 bool, int64_t kept_bytes) {
  const Shape shape = check_chunk_gla_fwd(q, k, v, g, gv, initial_state, cu_seqlens, state_v_first);
  check_nothing_kept("chunk_gla", check_kept_bytes("chunk_gla", kept_bytes));
  return with_call("chunk_gla", shape, cu_seqlens, scale, [&](auto& call) -> ForwardOutputs {
    using T = typename std::remove_reference_t<decltype(call)>::Accumulate;
    using P = Problem<T>;
    call.problem.state_v_first = state_v_first;
    call.inputs({{&P::q, q}, {&P::k, k}, {&P::v, v}});
    call.gates(g, gv);
    call.input_state(&P::h0, initial_state);
    at::Tensor o = call.output(&P::o, call.problem.V, v, v.scalar_type());
    at::Tensor final_state =
        output_final_state ? call.output_state(&P::ht, q) : not_asked_for(q, shape.accumulate);
    const bool sweep = sweeps(call, /*backward=*/false);
    at::Tensor states =
        save_states || !sweep ? call.output_chunk_states(q, saved_states_dtype(q)) : at::Tensor();
    if (sweep) {
      call.run(kernels<T>().forward_sweep);
    } else {
      call.run(kernels<T>().state_pass);
      call.run(kernels<T>().forward_chunk);
    }
    if (!save_states) states = not_asked_for(q, saved_states_dtype(q));
    return {o, final_state, states, not_asked_for(q, at::kByte)};
  });
}

BackwardOutputs chunk_gla_bwd_cpu(const at::Tensor& d_o, const OptionalTensor& dht,
                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const OptionalTensor& g, const OptionalTensor& gv,
                                  const OptionalTensor& initial_state,
                                  const OptionalTensor& cu_seqlens, const at::Tensor& states,
                                  std::optional<double> scale, bool state_v_first, bool,
                                  const OptionalTensor& kept) {
  const Shape shape = check_chunk_gla_bwd(d_o, dht, q, k, v, g, gv, initial_state, cu_seqlens,
                                          states, kept, state_v_first);
  if (given(kept)) check_nothing_kept("chunk_gla_bwd", kept->numel());
  return with_call("chunk_gla_bwd", shape, cu_seqlens, scale, [&](auto& call) -> BackwardOutputs {
    using T = typename std::remove_reference_t<decltype(call)>::Accumulate;
    using P = Problem<T>;
    auto& p = call.problem;
    p.state_v_first = state_v_first;
    call.inputs({{&P::q, q}, {&P::k, k}, {&P::v, v}, {&P::d_o, d_o}});
    call.gates(g, gv);
    call.input_state(&P::h0, initial_state);
    call.input_state(&P::dht, dht);
    at::Tensor dq = call.output(&P::dq, p.K, q, q.scalar_type());
    at::Tensor dk = call.output(&P::dk, p.K, k, k.scalar_type());
    at::Tensor dv = call.output(&P::dv, p.V, v, v.scalar_type());
    at::Tensor dg = call.gate_grad(&P::dg, p.K, g, q);
    at::Tensor dgv = call.gate_grad(&P::dgv, p.V, gv, q);
    at::Tensor dh0 =
        given(initial_state) ? call.output_state(&P::dh0, q) : not_asked_for(q, shape.accumulate);
    const bool saved = states.dim() != 1;
    if (saved) call.input_chunk_states(states);
    if (sweeps(call, /*backward=*/true)) {
      if (!saved) p.S_dtype = dtype_of(saved_states_dtype(q));
      call.run(kernels<T>().backward_sweep, /*states_behind_workspace=*/!saved);
    } else {
      at::Tensor S, dS;
      if (!saved) {
        S = call.output_chunk_states(q, saved_states_dtype(q));
        call.run(kernels<T>().state_pass);
      }
      dS = call.output_chunk_state_grads(q);
      call.run(kernels<T>().state_grad_pass);
      call.run(kernels<T>().backward_chunk);
    }
    return with_shared_heads({dq, dk, dv, dg, dgv, dh0}, k.size(2));
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("chunk_gla_fwd", chunk_gla_fwd_cpu);
  m.impl("chunk_gla_bwd", chunk_gla_bwd_cpu);
}

}  // namespace gla_ext::cpu
