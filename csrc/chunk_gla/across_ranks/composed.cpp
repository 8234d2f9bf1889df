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

Shape check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
            const OptionalTensor& gv) {
  const OptionalTensor none;
  return check_chunk_gla_fwd({q, k, v, g, gv, none, none, std::nullopt, false, false, false, 0});
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

at::Tensor sum_of_gates(const OptionalTensor& gate, const at::Tensor& q, const Shape& shape) {
  if (!given(gate)) return at::empty({0}, q.options().dtype(shape.accumulate));
  const at::Tensor sums = at::sum(*gate, {1}, /*keepdim=*/false, shape.accumulate);
  const int64_t H = q.size(2), HK = sums.size(1);
  return H == HK ? sums : sums.repeat_interleave(H / HK, 1);
}

std::tuple<at::Tensor, at::Tensor> summary(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const OptionalTensor& g,
                                           const OptionalTensor& gv,
                                           const OptionalTensor& initial_state,
                                           std::optional<double> scale, bool state_v_first,
                                           bool batch_invariant, bool, int64_t prepared_bytes) {
  const Shape shape = check(q, k, v, g, gv);
  auto [o, state, left] =
      chunk_gla_fwd(q, k, v, g, gv, initial_state, {}, scale,
                    /*output_final_state=*/true, state_v_first, batch_invariant, 0);
  if (state_v_first) state = state.transpose(-1, -2);
  return {at::cat({state.reshape({-1}), sum_of_gates(g, q, shape).flatten(),
                   sum_of_gates(gv, q, shape).flatten()}),
          bytes(q, prepared_bytes)};
}

ForwardOutputs apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const OptionalTensor& g, const OptionalTensor& gv,
                     const OptionalTensor& initial_state, std::optional<double> scale,
                     bool output_final_state, bool state_v_first, bool batch_invariant, bool,
                     const at::Tensor&, int64_t segments) {
  auto [o, final_state, left] =
      chunk_gla_fwd(q, k, v, g, gv, initial_state, {}, scale, output_final_state, state_v_first,
                    batch_invariant, 0);
  const auto accumulate = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {o, final_state,
          at::empty({q.size(0), segments, q.size(2), q.size(3), v.size(3)},
                    q.options().dtype(accumulate))};
}

std::tuple<at::Tensor, at::Tensor> summary_bwd(const at::Tensor& d_o, const OptionalTensor& dht,
                                               const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v, const OptionalTensor& g,
                                               const OptionalTensor& gv,
                                               std::optional<double> scale, bool state_v_first,
                                               bool batch_invariant, const at::Tensor&,
                                               int64_t prepared_bytes) {
  const Shape shape = check(q, k, v, g, gv);
  const int64_t K = q.size(3), V = v.size(3);
  const at::Tensor none =
      at::zeros({q.size(0), q.size(2), state_v_first ? V : K, state_v_first ? K : V},
                q.options().dtype(shape.accumulate));
  at::Tensor dh0 = std::get<5>(
      chunk_gla_bwd(d_o, dht, q, k, v, g, gv, none, {}, scale, state_v_first, batch_invariant));
  if (state_v_first) dh0 = dh0.transpose(-1, -2).contiguous();
  return {dh0, bytes(q, prepared_bytes)};
}

BackwardOutputs apply_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
                          const OptionalTensor& gv, const OptionalTensor& initial_state,
                          std::optional<double> scale, bool state_v_first, bool batch_invariant,
                          const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  return chunk_gla_bwd(d_o, dht, q, k, v, g, gv, initial_state, {}, scale, state_v_first,
                       batch_invariant);
}

}  // namespace halves
}  // namespace gla_ext
