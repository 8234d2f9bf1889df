// chunk_gla_ on CPU: the rows are gathered, chunk_gla's kernels run, and the states scattered, all
// within the operator.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "cpu/host/call.h"
#include "cpu/host/pool_rows.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

at::Tensor gather(const at::Tensor& pool, const std::vector<int64_t>& rows, at::ScalarType dtype) {
  std::vector<int64_t> sizes = pool.sizes().vec();
  sizes[0] = static_cast<int64_t>(rows.size());
  at::Tensor states = at::zeros(sizes, pool.options().dtype(dtype));
  for (size_t n = 0; n < rows.size(); ++n)
    if (rows[n] >= 0) states.select(0, static_cast<int64_t>(n)).copy_(pool.select(0, rows[n]));
  return states;
}

// All checkpoints, and the number of each sequence's first one.
struct Checkpoints {
  std::vector<int64_t> first;  // [N + 1]
  at::Tensor states;           // [all, H, K, V]

  // Writes the checkpoints of sequences that have a row to their places.
  void write(const PoolArguments& a, const std::vector<int64_t>& slots) const {
    const at::Tensor& to = given(a.checkpoints) ? *a.checkpoints : a.state;
    const auto N = static_cast<int64_t>(slots.size());
    const int64_t all = given(a.checkpoint_slots) ? a.checkpoint_slots->size(0) : to.size(0);
    const std::vector<int64_t> rows = values_of(a.checkpoint_slots, all);
    const std::vector<int64_t> starts =
        given(a.checkpoint_cu_starts) ? values_of(a.checkpoint_cu_starts, N + 1) : first;
    for (int64_t n = 0; n < N; ++n)
      for (int64_t j = 0; slots[n] >= 0 && j < first[n + 1] - first[n]; ++j) {
        const int64_t number = starts[n] + j;
        if (number < 0 || number >= all || number >= starts[n + 1]) continue;
        const int64_t row = rows[number];
        if (row >= 0 && row < to.size(0)) to.select(0, row).copy_(states.select(0, first[n] + j));
      }
  }
};

template <typename T>
Checkpoints make_checkpoints(Call<T>& call, int64_t every, const at::Tensor& like) {
  Checkpoints found;
  Problem<T>& p = call.problem;
  found.first.push_back(0);
  for (const Sequence& s : call.sequences())
    found.first.push_back(found.first.back() + (every > 0 ? s.length / every : 0));
  if (every == 0) return found;
  const int64_t rows = p.state_v_first ? p.V : p.K, columns = p.state_v_first ? p.K : p.V;
  found.states = at::empty({found.first.back(), p.H, rows, columns},
                           like.options().dtype(c10::CppTypeToScalarType<T>::value));
  p.checkpoint_chunks = every / kChunk;
  p.checkpoints = found.states.template mutable_data_ptr<T>();
  return found;
}

at::Tensor chunk_gla_on_pool_cpu(const PoolArguments& a) {
  const Shape shape = check_chunk_gla_on_pool(a);
  check_pool_layouts(a);
  return with_call("chunk_gla_", shape, a.cu_seqlens, a.scale, [&](auto& call) {
    using P = ProblemOf<decltype(call)>;
    const PoolRows rows(a.state, call.N, a.slots, a.write_slots, a.has_initial_state);
    call.problem.state_v_first = a.state_v_first;
    call.problem.past_alone = a.batch_invariant;
    call.tokens_of(&a.q, a.k, a.v, a.g, a.gv);
    call.input_state(&P::h0, gather(a.state, rows.read, shape.accumulate));
    at::Tensor o;
    if (a.out != nullptr)
      call.output_into(&P::o, o = *a.out);
    else
      o = call.output(&P::o, call.problem.V, a.v, a.v.scalar_type());
    const at::Tensor final_state = call.output_state(&P::ht, a.q);
    const Checkpoints kept = make_checkpoints(call, a.checkpoint_every, a.q);
    call.problem.first_checkpoint = kept.first.data();
    call.run_forward(a.q);
    for (const Sequence& s : call.sequences()) {
      if (rows.slots[s.n] < 0) o.select(0, s.row).narrow(0, s.start, s.length).zero_();
      if (rows.write[s.n] >= 0)
        a.state.select(0, rows.write[s.n]).copy_(final_state.select(0, s.n));
    }
    if (a.checkpoint_every > 0) kept.write(a, rows.slots);
    return o;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) { register_on_pool<chunk_gla_on_pool_cpu>(m); }

}  // namespace gla_ext::cpu
