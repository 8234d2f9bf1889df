// The recurrent operators on CPU: over sequences, and on a pool of states.
#include "checks/recurrent_gla.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "chunk_gla/op.h"
#include "common/groups.h"
#include "common/head_gates.h"
#include "host/call.h"
#include "host/pool_rows.h"
#include "on_pool.h"
#include "ops.h"

namespace gla_ext::cpu {
namespace {

at::Tensor not_asked_for(const at::Tensor& like, at::ScalarType dtype) {
  return at::empty({0}, like.options().dtype(dtype));
}

RecurrentForwardOutputs recurrent_gla_fwd_cpu(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
    const OptionalTensor& gv, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
    std::optional<double> scale, bool output_final_state, bool reverse, bool state_v_first) {
  const Shape shape =
      check_recurrent_fwd(q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  return with_call(
      "fused_recurrent_gla", shape, cu_seqlens, scale, [&](auto& call) -> RecurrentForwardOutputs {
        using T = typename std::remove_reference_t<decltype(call)>::Accumulate;
        using P = Problem<T>;
        call.problem.state_v_first = state_v_first;
        call.problem.reverse = reverse;
        call.inputs({{&P::q, q}, {&P::k, k}, {&P::v, v}});
        call.gates(gk, gv);
        call.input_state(&P::h0, initial_state);
        at::Tensor o = call.output(&P::o, call.problem.V, v, v.scalar_type());
        at::Tensor final_state =
            output_final_state ? call.output_state(&P::ht, q) : not_asked_for(q, shape.accumulate);
        call.run(kernels<T>().recurrent_forward, call.sequence_runs(), /*backward=*/false);
        return {o, final_state};
      });
}

BackwardOutputs recurrent_gla_bwd_cpu(const at::Tensor& d_o, const OptionalTensor& dht,
                                      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const OptionalTensor& gk, const OptionalTensor& gv,
                                      const OptionalTensor& initial_state,
                                      const OptionalTensor& cu_seqlens, std::optional<double> scale,
                                      bool reverse, bool state_v_first) {
  const Shape shape =
      check_recurrent_bwd(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  return with_call(
      "recurrent_gla_bwd", shape, cu_seqlens, scale, [&](auto& call) -> BackwardOutputs {
        using T = typename std::remove_reference_t<decltype(call)>::Accumulate;
        using P = Problem<T>;
        auto& p = call.problem;
        p.state_v_first = state_v_first;
        p.reverse = reverse;
        call.inputs({{&P::q, q}, {&P::k, k}, {&P::v, v}, {&P::d_o, d_o}});
        call.gates(gk, gv);
        call.input_state(&P::h0, initial_state);
        call.input_state(&P::dht, dht);
        at::Tensor dq = call.output(&P::dq, p.K, q, q.scalar_type());
        at::Tensor dk = call.output(&P::dk, p.K, k, k.scalar_type());
        at::Tensor dv = call.output(&P::dv, p.V, v, v.scalar_type());
        at::Tensor dgk = call.gate_grad(&P::dg, p.K, gk, q);
        at::Tensor dgv = call.gate_grad(&P::dgv, p.V, gv, q);
        at::Tensor dh0 = given(initial_state) ? call.output_state(&P::dh0, q)
                                              : not_asked_for(q, shape.accumulate);
        call.run(kernels<T>().recurrent_backward, call.sequence_runs(), /*backward=*/true);
        return with_shared_heads({dq, dk, dv, sum_over_channels(dgk, gk), dgv, dh0}, k.size(2));
      });
}

// The heads of each sequence whose slot is in the pool. The others get o = 0.
template <typename T>
std::vector<Run<T>> pool_runs(const Call<T>& call, const PoolInputs& pool, bool write,
                              const at::Tensor& o) {
  const at::Tensor& state = pool.state;
  const OptionalTensor none;
  const PoolRows rows(state, call.N, pool.slots,
                      pool.write_slots != nullptr ? *pool.write_slots : none, none);
  const auto accepted =
      pool.accepted != nullptr ? values_of(*pool.accepted, call.N) : std::vector<int64_t>();
  const DType dtype = dtype_of(state.scalar_type());
  auto* states = static_cast<char*>(const_cast<void*>(state.const_data_ptr()));
  const auto matrix = [&](int64_t slot, int64_t head) {
    return states + (slot * state.stride(0) + head * state.stride(1)) * state.element_size();
  };
  std::vector<Run<T>> runs;
  for (const Sequence& s : call.sequences()) {
    const int64_t from = rows.slots[s.n], to = rows.write[s.n];
    if (from < 0) {
      if (o.defined()) o.select(0, s.row).narrow(0, s.start, s.length).zero_();
      continue;
    }
    int64_t length = s.length;
    if (pool.accepted != nullptr) length = std::clamp<int64_t>(accepted[s.n], 0, length);
    const bool writes = write && to >= 0 && (length > 0 || to != from);
    if (length == 0 && !writes) continue;
    for (int64_t head = 0; head < call.problem.H; ++head) {
      Run<T>& run = runs.emplace_back(Run<T>{s.row, s.start, length, head, matrix(from, head)});
      if (writes) run.state_out = matrix(to, head);
      run.state_dtype = dtype;
    }
  }
  return runs;
}

at::Tensor run_on_pool(const RecurrentInputs& in, const PoolInputs& pool,
                       std::optional<double> scale, bool write) {
  const Shape shape = check_pool(in, pool);
  check_pool_layout(in.op, pool.state, write);
  if (pool.out != nullptr) check_out_layout(in, pool);
  const OptionalTensor cu_seqlens = pool.cu_seqlens != nullptr ? *pool.cu_seqlens : std::nullopt;
  return with_call(in.op, shape, cu_seqlens, scale, [&](auto& call) {
    using T = typename std::remove_reference_t<decltype(call)>::Accumulate;
    using P = Problem<T>;
    call.problem.state_v_first = pool.state_v_first;
    call.inputs({{&P::k, *in.k}, {&P::v, *in.v}});
    call.gates(*in.gk, *in.gv);
    at::Tensor o;
    if (in.q != nullptr) {
      call.inputs({{&P::q, *in.q}});
      if (pool.out != nullptr)
        call.output_into(&P::o, o = *pool.out);
      else
        o = call.output(&P::o, call.problem.V, *in.v, in.v->scalar_type());
    }
    call.run(kernels<T>().recurrent_forward, pool_runs(call, pool, write, o), /*backward=*/false);
    return o;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("recurrent_gla_fwd", recurrent_gla_fwd_cpu);
  m.impl("recurrent_gla_bwd", recurrent_gla_bwd_cpu);
  RecurrentOnPool<run_on_pool>::register_in(m);
}

}  // namespace gla_ext::cpu
