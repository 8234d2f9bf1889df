// chunk_gla_, on a pool of states: its arguments by name, and what they are checked for.
#pragma once

#include "chunk_gla/op.h"

namespace gla_ext {

// As ops.h describes them.
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

// The operator, through the dispatcher.
at::Tensor dispatch(const PoolArguments& a);

constexpr int64_t kMostCheckpointTokens = int64_t{1} << 30;  // between two of a sequence

Shape check_chunk_gla_on_pool(const PoolArguments& a);

// For backends: the pool, the checkpoints and `out` are written where they lie.
void check_pool_layouts(const PoolArguments& a);

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
