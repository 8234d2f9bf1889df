// The two paths of a call, each a plan of its passes, and what they share.
#pragma once

#include "plan.h"

namespace gla_ext::cuda {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

// plan_steps.cpp: one pass by the steps.
PassPlan plan_steps(const PlanInputs& in, const ChunkGrid& grid, bool backward);
// plan_fused.cpp: both passes by the kernels of sm90/.
CallPlan plan_fused(const PlanInputs& in, const ChunkGrid& grid);

// plan_head_gates.cpp: whether the kernels for one gate a head, or none, take a pass, and its plan.
bool forward_takes_head_gates(const PlanInputs& in);
bool backward_takes_head_gates(const PlanInputs& in);
PassPlan plan_head_gates(const PlanInputs& in, const ChunkGrid& grid, bool backward);

// What sweeps over packed sequences find their segments by.
void add_packed_lists(Workspace& w, const ChunkGrid& grid, const Segments& cut);

// The kernels that map packed sequences, if they are.
void add_map(Recipe& kernels, const ChunkGrid& grid);

// Bytes of S, or dS, of every chunk.
int64_t chunk_state_bytes(const PlanInputs& in, const ChunkGrid& grid);

// What step 6 hands to step 7, but where gradients that are fp32 themselves take it.
void add_intra(Workspace& w, const PlanInputs& in, int64_t keys);

}  // namespace gla_ext::cuda
