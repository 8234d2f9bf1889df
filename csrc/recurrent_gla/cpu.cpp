// The recurrent operators on CPU: over sequences, and on a pool of states.
#include <algorithm>

#include "common/heads.h"
#include "cpu/host/call.h"
#include "cpu/host/pool_rows.h"
#include "cpu_kernels.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

// A run for every sequence and head, from h0 to ht and from dht to dh0.
template <typename T>
std::vector<Run<T>> sequence_runs(const Call<T>& call) {
  const Problem<T>& p = call.problem;
  std::vector<Run<T>> runs;
  for (const Sequence& s : call.sequences())
    for (int64_t head = 0; head < p.H; ++head) {
      const auto matrix = [&](auto* states) {
        return states == nullptr ? nullptr : states + (s.n * p.H + head) * p.K * p.V;
      };
      runs.push_back({s.row, s.start, s.length, head, matrix(p.h0), matrix(p.ht), matrix(p.dht),
                      matrix(p.dh0)});
    }
  return runs;
}

template <typename T>
void run(const Call<T>& call, const std::vector<Run<T>>& runs, bool backward) {
  const auto& kernels = KernelTables<RecurrentKernels<T>>::in_use();
  const auto task = backward ? kernels.backward : kernels.forward;
  const Problem<T>& p = call.problem;
  int64_t longest = 0;
  for (const Run<T>& run : runs) longest = std::max(longest, run.length);
  for_each_task<T>(static_cast<int64_t>(runs.size()),
                   kernels.workspace(p.K, p.V, longest, backward),
                   [&](T* workspace, int64_t i) { task(p, workspace, runs[i]); });
}

RecurrentForwardOutputs recurrent_gla_fwd_cpu(const RecurrentForwardArguments& a) {
  const auto forward = [&](auto& call) -> RecurrentForwardOutputs {
    using P = ProblemOf<decltype(call)>;
    call.problem.state_v_first = a.state_v_first;
    call.problem.reverse = a.reverse;
    call.tokens_of(&a.q, a.k, a.v, a.gk, a.gv);
    call.input_state(&P::h0, a.initial_state);
    at::Tensor o = call.output(&P::o, call.problem.V, a.v, a.v.scalar_type());
    at::Tensor final_state = call.output_state(&P::ht, a.q, a.output_final_state);
    run(call, sequence_runs(call), /*backward=*/false);
    return {o, final_state};
  };
  return with_call("fused_recurrent_gla", check_recurrent_fwd(a), a.cu_seqlens, a.scale, forward);
}

BackwardOutputs recurrent_gla_bwd_cpu(const RecurrentBackwardArguments& a) {
  const auto backward = [&](auto& call) -> BackwardOutputs {
    using P = ProblemOf<decltype(call)>;
    call.problem.state_v_first = a.state_v_first;
    call.problem.reverse = a.reverse;
    call.tokens_of(&a.q, a.k, a.v, a.gk, a.gv);
    call.inputs({{&P::d_o, a.d_o}});
    call.input_state(&P::h0, a.initial_state);
    call.input_state(&P::dht, a.dht);
    auto [dq, dk, dv, dgk, dgv, dh0] = call.gradients(a.q, a.k, a.v, a.gk, a.gv, a.initial_state);
    run(call, sequence_runs(call), /*backward=*/true);
    return with_shared_heads({dq, dk, dv, sum_over_channels(dgk, a.gk), dgv, dh0}, a.k.size(2));
  };
  return with_call("recurrent_gla_bwd", check_recurrent_bwd(a), a.cu_seqlens, a.scale, backward);
}

// Runs for the heads of each sequence whose slot is in the pool. The others get o = 0.
template <typename T>
std::vector<Run<T>> pool_runs(const Call<T>& call, const PoolInputs& pool, bool write,
                              const at::Tensor& o) {
  const at::Tensor& state = pool.state;
  const PoolRows rows(state, call.N, pool.slots,
                      pool.write_slots != nullptr ? *pool.write_slots : kAbsent, kAbsent);
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

at::Tensor run_on_pool(const TokenInputs& in, const PoolInputs& pool, std::optional<double> scale,
                       bool write) {
  const Shape shape = check_pool(in, pool);
  check_layouts(in, pool, write);
  const OptionalTensor cu_seqlens = pool.cu_seqlens != nullptr ? *pool.cu_seqlens : std::nullopt;
  return with_call(in.op, shape, cu_seqlens, scale, [&](auto& call) {
    using P = ProblemOf<decltype(call)>;
    call.problem.state_v_first = pool.state_v_first;
    call.tokens_of(in.q, *in.k, *in.v, *in.gk, *in.gv);
    at::Tensor o;
    if (in.q != nullptr) {
      if (pool.out != nullptr)
        call.output_into(&P::o, o = *pool.out);
      else
        o = call.output(&P::o, call.problem.V, *in.v, in.v->scalar_type());
    }
    run(call, pool_runs(call, pool, write, o), /*backward=*/false);
    return o;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("recurrent_gla_fwd", by_arguments<recurrent_gla_fwd, recurrent_gla_fwd_cpu>);
  m.impl("recurrent_gla_bwd", by_arguments<recurrent_gla_bwd, recurrent_gla_bwd_cpu>);
  RecurrentOnPool<run_on_pool>::register_in(m);
}

}  // namespace gla_ext::cpu
