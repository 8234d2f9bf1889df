// Passes by the kernels of sm90/head_gates: one gate a head, or none.
#include <algorithm>

#include "cuda/sm90/head_gates/sums.h"
#include "paths.h"
#include "segments.h"

namespace gla_ext::cuda {
namespace {

// These kernels cut no sequence into segments. Where heads leave multiprocessors idle and sequences
// are long, the kernels that do are faster, although they have the gate spread over channels.
bool fills_gpu(const PlanInputs& in, const ChunkGrid& grid) {
  return in.batch_invariant || choose_forward_segments(in, grid).segments == 0;
}

bool takes(const PlanInputs& in, const ChunkGrid& grid, int64_t most_keys) {
  return in.sm90 && in.dtype == DType::kBFloat16 && (in.head_gated || !in.key_gated) &&
         !in.value_gated && in.K % 8 == 0 && in.V % 8 == 0 && in.aligned &&
         most_keys <= kFusedKeys && fills_gpu(in, grid);
}

PassPlan plan_pass(const PlanInputs& in, const ChunkGrid& grid,
                   std::initializer_list<Kernel> sweeps) {
  PassPlan plan;
  plan.reads_head_gates = true;
  add_map(plan.kernels, grid);
  plan.kernels.add(Kernel::kHeadGateSums);
  for (const Kernel kernel : sweeps) plan.kernels.add(kernel);
  plan.workspace = step_workspace(grid, in.H, /*tiers=*/false);
  add_packed_lists(plan.workspace, grid);
  const auto each = static_cast<int64_t>(sizeof(HeadGates));
  plan.workspace.add(Buffer::kPrepared, grid.B * grid.slots * in.H * each);
  return plan;
}

}  // namespace

bool forward_takes_head_gates(const PlanInputs& in, const ChunkGrid& grid) {
  return takes(in, grid, in.K);
}

// Keys and values change places in the gradients of q and k.
bool backward_takes_head_gates(const PlanInputs& in, const ChunkGrid& grid) {
  return (!in.key_gated || !in.gate_gradient) && takes(in, grid, std::max(in.K, in.V));
}

PassPlan plan_head_gates(const PlanInputs& in, const ChunkGrid& grid, bool backward) {
  if (!backward) return plan_pass(in, grid, {Kernel::kHeadGateForward});
  return plan_pass(
      in, grid,
      {Kernel::kHeadGateQueryGrads, Kernel::kHeadGateKeyGrads, Kernel::kHeadGateValueGrads});
}

}  // namespace gla_ext::cuda
