// Shapes and dtypes of every output, for tracing: the checks, then empty tensors. Sizes stay
// symbolic.
#include "dispatch/meta.h"

#include <torch/library.h>

#include "checks/recurrent_gla.h"
#include "chunk_gla/op.h"
#include "on_pool.h"
#include "ops.h"
#include "steps/op.h"

namespace gla_ext {
namespace {

RecurrentForwardOutputs recurrent_gla_fwd_meta(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
    const OptionalTensor& gv, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
    std::optional<double>, bool output_final_state, bool, bool state_v_first) {
  const Shape s = check_recurrent_fwd(q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  return {fresh_output(s, v),
          output_final_state ? boundary_state(s, q, state_v_first) : empty({0}, q, s.accumulate)};
}

BackwardOutputs recurrent_gla_bwd_meta(const at::Tensor& d_o, const OptionalTensor& dht,
                                       const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const OptionalTensor& gk,
                                       const OptionalTensor& gv,
                                       const OptionalTensor& initial_state,
                                       const OptionalTensor& cu_seqlens, std::optional<double>,
                                       bool, bool state_v_first) {
  const Shape s =
      check_recurrent_bwd(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  return {fresh(q),
          fresh(k),
          fresh(v),
          gate_grad(gk, q, s),
          gate_grad(gv, q, s),
          given(initial_state) ? boundary_state(s, q, state_v_first) : empty({0}, q, s.accumulate)};
}

at::Tensor recurrent_on_pool_meta(const RecurrentInputs& in, const PoolInputs& pool,
                                  std::optional<double>, bool) {
  const Shape s = check_pool(in, pool);
  return in.q != nullptr && pool.out == nullptr ? fresh_output(s, *in.v) : at::Tensor();
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl("recurrent_gla_fwd", recurrent_gla_fwd_meta);
  m.impl("recurrent_gla_bwd", recurrent_gla_bwd_meta);
  RecurrentOnPool<recurrent_on_pool_meta>::register_in(m);
}

}  // namespace gla_ext
