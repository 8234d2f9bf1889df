#include "plan.h"

#include "paths.h"

namespace gla_ext::cuda {

void add_map(Recipe& kernels, const ChunkGrid& grid) {
  if (!grid.packed) return;
  kernels.add(Kernel::kMapSequences);
  kernels.add(Kernel::kMapChunks);
}

int64_t chunk_state_bytes(const PlanInputs& in, const ChunkGrid& grid) {
  return grid.B * grid.chunks * in.H * in.K * in.V * bytes_of(intermediate_dtype(in.dtype));
}

void add_intra(Workspace& w, const PlanInputs& in, int64_t keys) {
  if (in.dtype != DType::kFloat) {
    w.add(Buffer::kDqIntra, keys);
    w.add(Buffer::kDkIntra, keys);
  }
  if (in.key_gated && in.gate_dtype != DType::kFloat) w.add(Buffer::kDgIntra, keys);
}

ChunkGrid make_grid(int64_t N, int64_t T, bool packed) {
  ChunkGrid grid;
  grid.B = packed ? 1 : N;
  grid.T = T;
  grid.N = N;
  grid.packed = packed;
  grid.chunks = packed ? T / kChunk + N : (T + kChunk - 1) / kChunk;
  grid.entries = grid.chunks + packed;
  return grid;
}

void add_packed_lists(Workspace& w, const ChunkGrid& grid, const Segments& cut) {
  if (!grid.packed) return;
  constexpr auto kEach = static_cast<int64_t>(sizeof(int32_t));
  w.add(Buffer::kByLastSegment, (grid.N + 1) * kEach);
  if (cut.segments > 0) w.add(Buffer::kCutSequences, most_followed(cut, grid.N) * kEach);
  w.add(Buffer::kTotals, static_cast<int64_t>(sizeof(PackedTotals)));
}

Recipe step_recipe(const ChunkGrid& grid, std::initializer_list<Kernel> kernels) {
  Recipe recipe;
  add_map(recipe, grid);
  for (const Kernel kernel : kernels) recipe.add(kernel);
  return recipe;
}

const char* why_not_fused(const PlanInputs& in) {
  if (in.value_gated) return "no gates on values (gv)";
  if (!in.sm90) return "a GPU of compute capability 9.0 and a build for 9.0a";
  if (in.dtype != DType::kBFloat16) return "q, k and v in torch.bfloat16";
  if (in.K % 8 != 0 || in.V % 8 != 0) return "K and V to be multiples of 8";
  if (!in.aligned) return "rows that start at multiples of 16 bytes";
  if (in.K > kFusedKeys) return "K to be at most 256";
  if (in.key_gated && in.gate_dtype == DType::kHalf) return "g in torch.bfloat16 or torch.float32";
  return nullptr;
}

namespace {

// The plan for a gate per key channel. A gate per head may have been copied to all channels.
CallPlan plan_by_channels(const PlanInputs& in, const ChunkGrid& grid) {
  if (in.choice != PathChoice::kSteps && in.key_gated && why_not_fused(in) == nullptr)
    return plan_fused(in, grid);
  CallPlan plan;
  plan.forward = plan_steps(in, grid, /*backward=*/false);
  plan.backward = plan_steps(in, grid, /*backward=*/true);
  return plan;
}

}  // namespace

CallPlan make_plan(const PlanInputs& in) {
  const ChunkGrid grid = make_grid(in.N, in.T, in.packed);
  const bool may = in.choice != PathChoice::kSteps && !in.in_halves;
  const bool forward = may && forward_takes_head_gates(in);
  const bool backward = may && backward_takes_head_gates(in);
  PlanInputs others = in;
  others.for_backward &= !forward && !backward;
  CallPlan plan = plan_by_channels(others, grid);
  if (forward) plan.forward = plan_head_gates(in, grid, /*backward=*/false);
  if (backward) plan.backward = plan_head_gates(in, grid, /*backward=*/true);
  if (forward || backward) plan.path = Path::kFused;
  return plan;
}

}  // namespace gla_ext::cuda
