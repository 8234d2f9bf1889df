#include "plan.h"

namespace gla_ext::cuda {
namespace {

constexpr int64_t kPartAlignment = 256;  // bytes

// The start of a new part at the end of the workspace.
int64_t add(Workspace& w, int64_t bytes) {
  const int64_t start = w.bytes;
  w.bytes += (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  return start;
}

}  // namespace

ChunkGrid make_grid(int64_t N, int64_t T, bool packed) {
  ChunkGrid grid;
  grid.B = packed ? 1 : N;
  grid.T = T;
  grid.N = N;
  grid.packed = packed;
  grid.chunks = packed ? T / kChunk + N : (T + kChunk - 1) / kChunk;
  grid.slots = grid.chunks + packed;
  return grid;
}

Workspace step_workspace(const ChunkGrid& grid, int64_t H, bool tiers) {
  Workspace w;
  if (grid.packed) {
    w.sequences = add(w, (grid.N + 1) * sizeof(Sequence));
    w.chunk_slots = add(w, grid.slots * sizeof(ChunkSlot));
  }
  if (tiers) w.tiers = add(w, grid.B * grid.slots * H * kMaxTierBlocks);
  return w;
}

Plan make_plan(const PlanInputs& in) {
  const ChunkGrid grid = make_grid(in.N, in.T, in.packed);
  const int64_t token_heads = grid.B * in.T * in.H;
  const int64_t each = bytes_of(intermediate_dtype(in.dtype));
  const int64_t keys = token_heads * in.K * static_cast<int64_t>(sizeof(float));
  const int64_t scores = token_heads * kChunk * each;
  const int64_t states = grid.B * grid.chunks * in.H * in.K * in.V * each;

  Plan plan{"steps", "materialised", step_workspace(grid, in.H, /*tiers=*/true), states, 0};
  Workspace& w = plan.workspace;
  w.b = add(w, keys);
  // Keeps fp32 accuracy beside resets; shorter inputs round to more than b loses there.
  if (in.dtype == DType::kFloat) w.b_suffix = add(w, keys);
  w.A = add(w, scores);
  if (!in.save_states) w.S = add(w, states);
  const int64_t map_launches = in.packed ? 2 : 0;
  plan.launches = map_launches + 6;
  if (!in.backward) return plan;

  w.dA = w.A;  // score_grads runs after value_grads, the last to read A
  w.dS = add(w, states);
  // Gradients that are fp32 themselves take what step 6 hands to step 7.
  if (in.dtype != DType::kFloat) {
    w.dq_intra = add(w, keys);
    w.dk_intra = add(w, keys);
  }
  if (in.gate_dtype != DType::kFloat) w.dg_intra = add(w, keys);
  plan.state_bytes += states;
  // bf16's two sweeps are one launch.
  plan.launches = map_launches + 10 + (in.dtype != DType::kBFloat16 && !in.save_states);
  return plan;
}

}  // namespace gla_ext::cuda
