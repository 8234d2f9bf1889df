// chunk_gla_, on a pool of states: its arguments by name, and their checks.
#pragma once

#include <torch/library.h>

#include "chunk_gla/op.h"

namespace gla_ext {

// Described in ops.h.
struct PoolArguments : ChunkInputs {
  at::Tensor& state;
  const OptionalTensor &slots, &write_slots, &has_initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool state_v_first, batch_invariant;
  int64_t checkpoint_every;
  const OptionalTensor& checkpoints;
  const OptionalTensor &checkpoint_slots, &checkpoint_cu_starts;
  Out out;  // [B, T, H, V], where o goes
};

constexpr int64_t kMostCheckpointTokens = int64_t{1} << 30;  // between two of a sequence

Shape check_chunk_gla_on_pool(const PoolArguments& a);

// For backends, which write the pool, the checkpoints and `out` in place.
void check_pool_layouts(const PoolArguments& a);

// Registers both forms of the operator from a backend's kernel.
template <auto kernel>
void register_on_pool(torch::Library& m) {
  m.impl("chunk_gla_", by_arguments<chunk_gla_, kernel>);
  m.impl("chunk_gla_.out", by_arguments<chunk_gla_out, kernel>);
}

}  // namespace gla_ext
