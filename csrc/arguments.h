// The arguments of chunk_gla's operators by name. A kernel takes them so and is registered as
// `positional<kernel>`; the schema, the C++ entry (ops.cpp, ops_pool.cpp) and what autograd saves
// (autograd/chunk_gla.cpp) list them again.
#pragma once

#include "common/shape.h"
#include "ops.h"

namespace gla_ext {

// As ops.h describes them.
struct ForwardArguments {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &g, &gv, &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool output_final_state, state_v_first, batch_invariant;
  int64_t for_backward_bytes;
};

struct BackwardArguments {
  const at::Tensor& d_o;
  const OptionalTensor& dht;
  const at::Tensor &q, &k, &v;
  const OptionalTensor &g, &gv, &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool state_v_first, batch_invariant;
  const OptionalTensor& for_backward;
  bool gate_gradient;
};

struct PoolArguments {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &g, &gv;
  at::Tensor& state;
  const OptionalTensor &slots, &write_slots, &has_initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool state_v_first, batch_invariant;
  int64_t checkpoint_every;
  const OptionalTensor& checkpoints;
  const OptionalTensor &checkpoint_slots, &checkpoint_cu_starts;
  at::Tensor* out = nullptr;  // [B, T, H, V], where o goes
};

// The operators, through the dispatcher.
ForwardOutputs dispatch(const ForwardArguments& a);
at::Tensor dispatch(const PoolArguments& a);

template <ForwardOutputs (*kernel)(const ForwardArguments&)>
ForwardOutputs positional(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const OptionalTensor& g, const OptionalTensor& gv,
                          const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                          std::optional<double> scale, bool output_final_state, bool state_v_first,
                          bool batch_invariant, int64_t for_backward_bytes) {
  return kernel({q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state,
                 state_v_first, batch_invariant, for_backward_bytes});
}

template <BackwardOutputs (*kernel)(const BackwardArguments&)>
BackwardOutputs positional(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                           const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
                           const OptionalTensor& gv, const OptionalTensor& initial_state,
                           const OptionalTensor& cu_seqlens, std::optional<double> scale,
                           bool state_v_first, bool batch_invariant,
                           const OptionalTensor& for_backward, bool gate_gradient) {
  return kernel({d_o, dht, q, k, v, g, gv, initial_state, cu_seqlens, scale, state_v_first,
                 batch_invariant, for_backward, gate_gradient});
}

template <at::Tensor (*kernel)(const PoolArguments&)>
at::Tensor positional(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const OptionalTensor& g, const OptionalTensor& gv, at::Tensor& state,
                      const OptionalTensor& slots, const OptionalTensor& write_slots,
                      const OptionalTensor& has_initial_state, const OptionalTensor& cu_seqlens,
                      std::optional<double> scale, bool state_v_first, bool batch_invariant,
                      int64_t checkpoint_every, const OptionalTensor& checkpoints,
                      const OptionalTensor& checkpoint_slots,
                      const OptionalTensor& checkpoint_cu_starts) {
  return kernel({q, k, v, g, gv, state, slots, write_slots, has_initial_state, cu_seqlens, scale,
                 state_v_first, batch_invariant, checkpoint_every, checkpoints, checkpoint_slots,
                 checkpoint_cu_starts});
}

template <at::Tensor (*kernel)(const PoolArguments&)>
void positional_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const OptionalTensor& g, const OptionalTensor& gv, at::Tensor& state,
                    const OptionalTensor& slots, const OptionalTensor& write_slots,
                    const OptionalTensor& has_initial_state, const OptionalTensor& cu_seqlens,
                    std::optional<double> scale, bool state_v_first, bool batch_invariant,
                    int64_t checkpoint_every, const OptionalTensor& checkpoints,
                    const OptionalTensor& checkpoint_slots,
                    const OptionalTensor& checkpoint_cu_starts, at::Tensor& out) {
  kernel({q, k, v, g, gv, state, slots, write_slots, has_initial_state, cu_seqlens, scale,
          state_v_first, batch_invariant, checkpoint_every, checkpoints, checkpoint_slots,
          checkpoint_cu_starts, &out});
}

}  // namespace gla_ext
