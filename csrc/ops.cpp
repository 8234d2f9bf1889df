// Schemas of gla_ext, those on a pool from ops_pool.cpp, and the
// entry points that call through the dispatcher.
#include "ops.h"

#include <torch/library.h>

#include "dispatch/op.h"
#include "schemas.h"

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  m.set_python_module("gla_ext.ops");
  // Inductor pads the rows of what it allocates, and copies what has not the exact strides of eager
  // mode unless an operator says that their order is enough. These read rows of any distance.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order};

  m.def(
      "recurrent_gla_fwd(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor? "
      "initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, bool reverse, "
      "bool state_v_first) -> (Tensor o, Tensor final_state)",
      tags);
  m.def(
      "recurrent_gla_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? "
      "gv, Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool reverse, bool "
      "state_v_first) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dgk, Tensor dgv, Tensor dh0)",
      tags);

  gla_ext::define_pool_operators(m, tags);
}

namespace gla_ext {

RecurrentForwardOutputs recurrent_gla_fwd(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const std::optional<at::Tensor>& gk,
                                          const std::optional<at::Tensor>& gv,
                                          const std::optional<at::Tensor>& initial_state,
                                          const std::optional<at::Tensor>& cu_seqlens,
                                          std::optional<double> scale, bool output_final_state,
                                          bool reverse, bool state_v_first) {
  static const Op<decltype(recurrent_gla_fwd)> op("gla_ext::recurrent_gla_fwd");
  return op(q, k, v, gk, gv, initial_state, cu_seqlens, scale, output_final_state, reverse,
            state_v_first);
}

BackwardOutputs recurrent_gla_bwd(const at::Tensor& d_o, const std::optional<at::Tensor>& dht,
                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const std::optional<at::Tensor>& gk,
                                  const std::optional<at::Tensor>& gv,
                                  const std::optional<at::Tensor>& initial_state,
                                  const std::optional<at::Tensor>& cu_seqlens,
                                  std::optional<double> scale, bool reverse, bool state_v_first) {
  static const Op<decltype(recurrent_gla_bwd)> op("gla_ext::recurrent_gla_bwd");
  return op(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, scale, reverse, state_v_first);
}

}  // namespace gla_ext
