// The recurrent operators on CPU: over sequences, and on a pool of states.
#include "checks/recurrent_gla.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "checks/chunk_gla.h"
#include "common/groups.h"
#include "common/head_gates.h"
#include "host/call.h"
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

std::vector<int64_t> values_of(const at::Tensor& indices) {
  const at::Tensor t = indices.to(at::kLong).contiguous();
  const auto* begin = t.const_data_ptr<int64_t>();
  return {begin, begin + t.numel()};
}

struct Pool {
  at::Tensor state;
  bool write;                                      // the state after a row's tokens
  const OptionalTensor& slots;                     // of each row
  std::optional<std::vector<int64_t>> accepted{};  // tokens of each row; absent: all
};

// The heads of each row whose slot is in the pool. Rows without one get o = 0.
template <typename T>
std::vector<Run<T>> pool_runs(const Call<T>& call, const Pool& pool, const at::Tensor& o) {
  std::vector<int64_t> slots;
  if (given(pool.slots)) slots = values_of(*pool.slots);
  auto* states = const_cast<T*>(pool.state.const_data_ptr<T>());
  std::vector<Run<T>> runs;
  for (int64_t row = 0; row < call.B; ++row) {
    const int64_t slot = given(pool.slots) ? slots[row] : row;
    if (slot < 0 || slot >= pool.state.size(0)) {
      if (o.defined()) o.select(0, row).zero_();
      continue;
    }
    int64_t length = call.tokens;
    if (pool.accepted.has_value()) length = std::clamp<int64_t>((*pool.accepted)[row], 0, length);
    if (length == 0) continue;
    for (int64_t head = 0; head < call.problem.H; ++head) {
      T* state = states + slot * pool.state.stride(0) + head * pool.state.stride(1);
      runs.push_back({row, 0, length, head, state, pool.write ? state : nullptr});
    }
  }
  return runs;
}

// q is null, and o not computed, where tokens are only committed.
at::Tensor run_on_pool(const RecurrentInputs& in, const Shape& shape, const Pool& pool,
                       std::optional<double> scale, bool state_v_first) {
  check_pool_layout(in.op, pool.state, pool.write);
  return with_call(in.op, shape, {}, scale, [&](auto& call) {
    using T = typename std::remove_reference_t<decltype(call)>::Accumulate;
    using P = Problem<T>;
    call.problem.state_v_first = state_v_first;
    call.inputs({{&P::k, *in.k}, {&P::v, *in.v}});
    call.gates(*in.gk, *in.gv);
    at::Tensor o;
    if (in.q != nullptr) {
      call.inputs({{&P::q, *in.q}});
      o = call.output(&P::o, call.problem.V, *in.v, in.v->scalar_type());
    }
    call.run(kernels<T>().recurrent_forward, pool_runs(call, pool, o), /*backward=*/false);
    return o;
  });
}

at::Tensor recurrent_gla_step_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const OptionalTensor& gk, const OptionalTensor& gv,
                                  at::Tensor& state, const OptionalTensor& slots,
                                  std::optional<double> scale, bool state_v_first) {
  const RecurrentInputs in{"recurrent_gla_step_", &q, &k, &v, &gk, &gv};
  const Shape shape = check_pool(in, {state, slots, nullptr, state_v_first});
  return run_on_pool(in, shape, {state, /*write=*/true, slots}, scale, state_v_first);
}

at::Tensor recurrent_gla_verify_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const OptionalTensor& gk, const OptionalTensor& gv,
                                    const at::Tensor& state, const OptionalTensor& slots,
                                    std::optional<double> scale, bool state_v_first) {
  const RecurrentInputs in{"recurrent_gla_verify", &q, &k, &v, &gk, &gv};
  const Shape shape = check_pool(in, {state, slots, nullptr, state_v_first});
  return run_on_pool(in, shape, {state, /*write=*/false, slots}, scale, state_v_first);
}

void recurrent_gla_commit_cpu(const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                              const OptionalTensor& gv, at::Tensor& state,
                              const OptionalTensor& slots, const at::Tensor& accepted,
                              bool state_v_first) {
  const RecurrentInputs in{"recurrent_gla_commit_", nullptr, &k, &v, &gk, &gv};
  const Shape shape = check_pool(in, {state, slots, &accepted, state_v_first});
  run_on_pool(in, shape, {state, /*write=*/true, slots, values_of(accepted)}, 1.0, state_v_first);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("recurrent_gla_fwd", recurrent_gla_fwd_cpu);
  m.impl("recurrent_gla_bwd", recurrent_gla_bwd_cpu);
  m.impl("recurrent_gla_step_", recurrent_gla_step_cpu);
  m.impl("recurrent_gla_verify", recurrent_gla_verify_cpu);
  m.impl("recurrent_gla_commit_", recurrent_gla_commit_cpu);
}

}  // namespace gla_ext::cpu
