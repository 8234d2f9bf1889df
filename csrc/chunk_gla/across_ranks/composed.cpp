// The halves composed of whole passes, for devices and calls without kernels that share work
// between them.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "op.h"

namespace gla_ext {
namespace halves {
namespace {

at::Tensor bytes(const at::Tensor& like, int64_t size) {
  return at::empty({size}, like.options().dtype(at::kByte));
}

// The sum of a gate over the tokens, [B, H, D], of H heads.
at::Tensor sum_of_gates(const OptionalTensor& gate, const at::Tensor& q, const Shape& shape) {
  if (!given(gate)) return at::empty({0}, q.options().dtype(shape.accumulate));
  const at::Tensor sums = at::sum(*gate, {1}, /*keepdim=*/false, shape.accumulate);
  const int64_t H = q.size(2), HK = sums.size(1);
  return H == HK ? sums : sums.repeat_interleave(H / HK, 1);
}

}  // namespace

FoldTensors::FoldTensors(const FoldArguments& arguments)
    : a(arguments), summaries(a.summaries.contiguous()) {
  check_chunk_gla_fold(a);
  if (a.backwards()) decays = a.decays->contiguous();
  if (given(a.boundary)) boundary = a.boundary->contiguous();
  x = at::empty(C10_AS_INTARRAYREF_SLOW(a.x_sizes()), summaries.options());
  kept = a.backwards() ? at::empty({0}, summaries.options())
                       : at::empty({a.size, a.decays_each().expect_int()}, summaries.options());
}

TwoTensors summary(const SummaryArguments& a) {
  const Shape shape = check_chunk_gla_fwd(whole(a));
  at::Tensor state = std::get<1>(dispatch(whole(a)));
  if (a.state_v_first) state = state.transpose(-1, -2);
  return {at::cat({state.reshape({-1}), sum_of_gates(a.g, a.q, shape).flatten(),
                   sum_of_gates(a.gv, a.q, shape).flatten()}),
          bytes(a.q, a.prepared_bytes)};
}

ForwardOutputs apply(const ApplyArguments& a) {
  auto [o, final_state, left] = dispatch(whole(a));
  return {o, final_state,
          at::empty({a.q.size(0), a.segments, a.q.size(2), a.q.size(3), a.v.size(3)},
                    a.q.options().dtype(accumulate_of(a.q)))};
}

TwoTensors summary_bwd(const SummaryBackwardArguments& a) {
  const Shape shape = check_chunk_gla_bwd(whole(a, kAbsent));
  const OptionalTensor zeros =
      at::zeros(C10_AS_INTARRAYREF_SLOW(states(shape, shape.N, a.state_v_first)),
                a.q.options().dtype(shape.accumulate));
  at::Tensor dh0 = std::get<5>(dispatch(whole(a, zeros)));
  if (a.state_v_first) dh0 = dh0.transpose(-1, -2).contiguous();
  return {dh0, bytes(a.q, a.prepared_bytes)};
}

BackwardOutputs apply_bwd(const ApplyBackwardArguments& a) { return dispatch(whole(a)); }

}  // namespace halves
}  // namespace gla_ext
