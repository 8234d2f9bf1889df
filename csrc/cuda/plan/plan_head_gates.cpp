// Plans of the kernels in sm90/head_gates: one gate per head, or none.
#include <algorithm>

#include "cuda/sm90/head_gates/sums.h"
#include "paths.h"
#include "segments.h"

namespace gla_ext::cuda {
namespace {

bool takes(const PlanInputs& in, int64_t most_keys) {
  return in.sm90 && in.dtype == DType::kBFloat16 && (in.head_gated || !in.key_gated) &&
         !in.value_gated && in.K % 8 == 0 && in.V % 8 == 0 && in.aligned && most_keys <= kFusedKeys;
}

// Either pass has the segments of forward. Sequences are not cut if a second segment would replay
// the first: a block waits for memory most of the time, so half as many blocks as the GPU holds are
// nearly as fast.
Segments choose_segments(PlanInputs in, const ChunkGrid& grid) {
  in.gate_dtype =
      DType::kBFloat16;  // small heads have two blocks per multiprocessor, whatever g is
  in.on_pool = false;
  const Segments segments = choose_forward_segments(in, grid);
  return segments.replays ? Segments{} : segments;
}

bool makes_gate_grads(const PlanInputs& in) { return in.key_gated && in.gate_gradient; }

void add_memory(PassPlan& plan, const PlanInputs& in, const ChunkGrid& grid, bool backward) {
  Workspace& w = plan.workspace = step_workspace(grid, in.H, /*tiers=*/false);
  add_packed_lists(w, grid, plan.segments);
  const auto each = static_cast<int64_t>(sizeof(HeadGates));
  const int64_t chunks = grid.B * grid.entries * in.H;
  w.add(Buffer::kPrepared, chunks * each);
  if (backward && makes_gate_grads(in)) {
    const int64_t parts = dot_parts(in.K, in.V);
    w.add(Buffer::kDqIntra, chunks * (parts + pair_parts(in.K)) * kDotBytes);
    w.add(Buffer::kDkIntra, chunks * parts * kDotBytes);
    w.add(Buffer::kDgIntra, grid.N * in.H * parts * kLastDotBytes);
  }
  const int64_t segment_keys = grid.B * plan.segments.segment_states * in.H * in.K;
  if (segment_keys == 0) return;
  w.add(Buffer::kSegmentDecays, segment_keys * kFloatBytes);
  w.add(Buffer::kSegmentStates, segment_keys * in.V * kFloatBytes);
  if (backward) w.add(Buffer::kSegmentStateGrads, segment_keys * in.V * kFloatBytes);
}

}  // namespace

bool forward_takes_head_gates(const PlanInputs& in) { return takes(in, in.K); }

// In the gradients of q and k, keys and values change places.
bool backward_takes_head_gates(const PlanInputs& in) { return takes(in, std::max(in.K, in.V)); }

PassPlan plan_head_gates(const PlanInputs& in, const ChunkGrid& grid, bool backward) {
  PassPlan plan;
  plan.reads_head_gates = true;
  plan.segments = choose_segments(in, grid);
  add_memory(plan, in, grid, backward);
  Recipe& kernels = plan.kernels;
  add_map(kernels, grid);
  kernels.add(Kernel::kHeadGateSums);
  if (plan.segments.segment_states > 0) {
    kernels.add(Kernel::kHeadGateSummaries);
    if (backward) kernels.add(Kernel::kHeadGateSummariesOfGrads);
    kernels.add(backward ? Kernel::kScanBoth : Kernel::kScan);
  }
  if (!backward) {
    kernels.add(Kernel::kHeadGateForward);
    return plan;
  }
  const bool gates = makes_gate_grads(in);
  kernels.add(gates ? Kernel::kHeadGateQueryGradsAndDots : Kernel::kHeadGateQueryGrads);
  kernels.add(gates ? Kernel::kHeadGateKeyGradsAndDots : Kernel::kHeadGateKeyGrads);
  if (gates) kernels.add(Kernel::kHeadGateGateGrads);
  kernels.add(Kernel::kHeadGateValueGrads);
  return plan;
}

}  // namespace gla_ext::cuda
