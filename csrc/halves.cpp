#include "halves.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

namespace gla_ext::halves {
namespace {

at::Tensor bytes(const at::Tensor& like, int64_t size) {
  return at::empty({size}, like.options().dtype(at::kByte));
}

Shape check(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
            const OptionalTensor& g, const OptionalTensor& gv) {
  const OptionalTensor none;
  return check_chunk_gla_fwd({q, k, v, g, gv, none, none, std::nullopt, false, false, false, 0});
}

}  // namespace

at::Tensor sum_of_gates(const OptionalTensor& gate, const at::Tensor& q, const Shape& shape) {
  if (!given(gate)) return at::empty({0}, q.options().dtype(shape.accumulate));
  const at::Tensor sums = at::sum(*gate, {1}, /*keepdim=*/false, shape.accumulate);
  const int64_t H = q.size(2), HK = sums.size(1);
  return H == HK ? sums : sums.repeat_interleave(H / HK, 1);
}

SummaryOutputs summary(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const OptionalTensor& g, const OptionalTensor& gv,
                       std::optional<double> scale, bool batch_invariant, bool,
                       int64_t prepared_bytes) {
  const Shape shape = check("chunk_gla_summary", q, k, v, g, gv);
  auto [o, state, left] = chunk_gla_fwd(q, k, v, g, gv, {}, {}, scale, /*output_final_state=*/true,
                                        /*state_v_first=*/false, batch_invariant, 0);
  return {state, sum_of_gates(g, q, shape), sum_of_gates(gv, q, shape), bytes(q, prepared_bytes)};
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

std::tuple<at::Tensor, at::Tensor> summary_bwd(const at::Tensor& d_o, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const OptionalTensor& g, const OptionalTensor& gv,
                                               std::optional<double> scale, bool batch_invariant,
                                               const at::Tensor&, int64_t prepared_bytes) {
  const Shape shape = check("chunk_gla_summary_bwd", q, k, v, g, gv);
  const at::Tensor none =
      at::zeros({q.size(0), q.size(2), q.size(3), v.size(3)}, q.options().dtype(shape.accumulate));
  auto grads = chunk_gla_bwd(d_o, {}, q, k, v, g, gv, none, {}, scale, /*state_v_first=*/false,
                             batch_invariant);
  return {std::get<5>(grads), bytes(q, prepared_bytes)};
}

BackwardOutputs apply_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
                          const OptionalTensor& gv, const OptionalTensor& initial_state,
                          std::optional<double> scale, bool state_v_first, bool batch_invariant,
                          const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  return chunk_gla_bwd(d_o, dht, q, k, v, g, gv, initial_state, {}, scale, state_v_first,
                       batch_invariant);
}

}  // namespace gla_ext::halves
