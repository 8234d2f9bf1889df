// Makes the plans of the two paths of a call. Also declares the helpers that they share.
#pragma once

#include "plan.h"

namespace gla_ext::cuda {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

// plan_steps.cpp: one pass by the steps.
PassPlan plan_steps(const PlanInputs& in, const ChunkGrid& grid, bool backward);
// plan_fused.cpp: both passes by the kernels of sm90/.
CallPlan plan_fused(const PlanInputs& in, const ChunkGrid& grid);

// plan_head_gates.cpp: whether the kernels for one gate per head, or none, can run a pass; and its
// plan.
bool forward_takes_head_gates(const PlanInputs& in);
bool backward_takes_head_gates(const PlanInputs& in);
PassPlan plan_head_gates(const PlanInputs& in, const ChunkGrid& grid, bool backward);

// Adds the lists in which sweeps over packed sequences find their segments.
void add_packed_lists(Workspace& w, const ChunkGrid& grid, const Segments& cut);

// Adds the kernels that map packed sequences, if sequences are packed.
void add_map(Recipe& kernels, const ChunkGrid& grid);

// Bytes of S, or dS, for all chunks.
int64_t chunk_state_bytes(const PlanInputs& in, const ChunkGrid& grid);

// Adds the buffers in which step 6 passes gradients to step 7. fp32 gradients need none: they hold
// these values themselves.
void add_intra(Workspace& w, const PlanInputs& in, int64_t keys);

}  // namespace gla_ext::cuda
