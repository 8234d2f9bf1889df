// The step path: a kernel per step, or two if chunks with strong gates have their own.
#include "paths.h"
#include "segments.h"

namespace gla_ext::cuda {
namespace {

// Adds step 1 for the given gates and, with gates on values, the gating of v and do.
void add_gates(Recipe& kernels, const PlanInputs& in) {
  if (in.key_gated) kernels.add(Kernel::kGateCumsum);
  if (!in.value_gated) return;
  kernels.add(Kernel::kGateCumsum, Side::kValues);
  kernels.add(Kernel::kGateValues);
}

// The strong kernels come first: past alone, the last writes over their rows.
void add_scores(Recipe& kernels, Side side = Side::kKeys) {
  kernels.add(Kernel::kStrongScoresOffDiagonal, side);
  kernels.add(Kernel::kStrongScoresDiagonal, side);
  kernels.add(Kernel::kScoresOffDiagonal, side);
}

void add_intra_grads(Recipe& kernels, Side side = Side::kKeys) {
  kernels.add(Kernel::kIntraGrads, side);
  kernels.add(Kernel::kStrongIntraGrads, side);
}

void add_summaries(Recipe& kernels, const PlanInputs& in, const Segments& cut, bool backward) {
  if (cut.segments == 0) return;
  if (backward && in.dtype == DType::kBFloat16) {
    kernels.add(Kernel::kStatesAndStateGradsSummaries);
  } else {
    kernels.add(Kernel::kChunkStatesSummaries);
    if (backward) kernels.add(Kernel::kStateGradsSummaries);
  }
  kernels.add(Kernel::kSegmentScan);
}

Recipe forward_steps(const PlanInputs& in, const ChunkGrid& grid, const Segments& cut) {
  Recipe kernels;
  add_map(kernels, grid);
  add_gates(kernels, in);
  add_summaries(kernels, in, cut, /*backward=*/false);
  kernels.add(in.value_gated ? Kernel::kValueGatedStates : Kernel::kChunkStates);
  add_scores(kernels);
  kernels.add(in.value_gated ? Kernel::kValueGatedOutput : Kernel::kOutput);
  return kernels;
}

Recipe backward_steps(const PlanInputs& in, const ChunkGrid& grid, const Segments& cut) {
  Recipe kernels;
  add_map(kernels, grid);
  add_gates(kernels, in);
  add_scores(kernels);
  if (in.value_gated) {  // scores and step 6 of the value side replace steps 4 and 5
    kernels.add(Kernel::kValueGatedStates);
    kernels.add(Kernel::kValueGatedStateGrads);
    add_scores(kernels, Side::kValues);
    add_intra_grads(kernels);
    add_intra_grads(kernels, Side::kValues);
    kernels.add(Kernel::kMergeKeyGrads);
    kernels.add(Kernel::kMergeValueGrads);
    return kernels;
  }
  add_summaries(kernels, in, cut, /*backward=*/true);
  if (in.dtype == DType::kBFloat16) {
    kernels.add(Kernel::kStatesAndStateGrads);
  } else {  // one kernel for both would spill
    kernels.add(Kernel::kChunkStates);
    kernels.add(Kernel::kStateGrads);
  }
  kernels.add(Kernel::kValueGrads);
  kernels.add(Kernel::kScoreGrads);
  add_intra_grads(kernels);
  kernels.add(Kernel::kMergeGrads);
  return kernels;
}

void add_value_gates(Workspace& w, const PlanInputs& in, const ChunkGrid& grid, bool backward) {
  const int64_t elements = grid.B * in.T * in.H * in.V, floats = elements * kFloatBytes;
  const int64_t operand = elements * bytes_of(intermediate_dtype(in.dtype));
  w.add(Buffer::kBv, floats);
  if (in.dtype == DType::kFloat) w.add(Buffer::kBvSuffix, floats);
  w.add(Buffer::kVOut, operand);
  if (!backward) return;
  w.add(Buffer::kValueTiers, tier_bytes(grid, in.H));
  w.add(Buffer::kDoIn, operand);
  w.add(Buffer::kOIntra, floats);
  if (in.dtype != DType::kFloat) w.add(Buffer::kDvIntra, floats);
  if (in.value_gate_dtype != DType::kFloat) w.add(Buffer::kDgvIntra, floats);
}

}  // namespace

PassPlan plan_steps(const PlanInputs& in, const ChunkGrid& grid, bool backward) {
  const int64_t token_heads = grid.B * in.T * in.H;
  const int64_t each = bytes_of(intermediate_dtype(in.dtype));
  const int64_t keys = token_heads * in.K * kFloatBytes;
  const int64_t states = chunk_state_bytes(in, grid);
  PassPlan plan;
  const Segments cut = plan.segments = choose_step_segments(in, grid, backward);
  plan.kernels = backward ? backward_steps(in, grid, cut) : forward_steps(in, grid, cut);
  Workspace& w = plan.workspace = step_workspace(grid, in.H, /*tiers=*/true);
  if (in.key_gated) {
    w.add(Buffer::kB, keys);
    // Keeps fp32 accuracy next to resets. Shorter inputs lose more by rounding than b loses there.
    if (in.dtype == DType::kFloat) w.add(Buffer::kBSuffix, keys);
  } else {
    w.add(Buffer::kNoDecay, in.K * kFloatBytes);
  }
  if (cut.segments > 0) {
    const int64_t heads = grid.B * cut.segment_states * in.H * kFloatBytes;
    w.add(Buffer::kSegmentStates, heads * in.K * in.V);
    if (backward) w.add(Buffer::kSegmentStateGrads, heads * in.K * in.V);
    w.add(Buffer::kSegmentDecays, heads * in.K);
  }
  w.add(Buffer::kA, token_heads * kChunk * each);
  w.add(Buffer::kS, states);
  plan.state_bytes = states;
  if (backward) {
    // score_grads runs after value_grads, the last reader of A. This order does
    // not hold with gates on values.
    if (in.value_gated)
      w.add(Buffer::kDA, token_heads * kChunk * each);
    else
      w.reuse(Buffer::kDA, Buffer::kA);
    w.add(Buffer::kDS, states);
    add_intra(w, in, keys);
    plan.state_bytes += states;
  }
  if (in.value_gated) add_value_gates(w, in, grid, backward);
  return plan;
}

}  // namespace gla_ext::cuda
