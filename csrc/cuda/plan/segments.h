// Whether the sweeps of the fused path cut sequences into segments, to fill the GPU, and where.
#pragma once

#include "plan.h"

namespace gla_ext::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Which sweeps visit the segments: forward's; those of backward that make S and dS; or that of
// backward that makes all gradients with dS on chip.
enum class Sweeps : uint8_t { kForward, kStates, kGradients };

// Heads of at most 64 keys and 64 values, one tile, with bf16 gates: forward and gradients have
// kernels of their own for them.
bool is_small_head(const PlanInputs& in);

// How many blocks of such sweeps the GPU holds at a time: one a multiprocessor; two of small heads
// and, in backward, of all heads of one tile.
int64_t resident_blocks(const PlanInputs& in, Sweeps sweeps);

// Every segment has a summary, where there would be none a single one.
Segments in_halves(Segments cut, const PlanInputs& in);

Segments choose_forward_segments(const PlanInputs& in, const ChunkGrid& grid);

// Backward makes gradients in one sweep with dS on chip, or by a kernel over chunks that reads dS
// from memory.
struct BackwardSweeps {
  Segments segments;
  bool gradients = false;  // the former
};
BackwardSweeps choose_backward_sweeps(const PlanInputs& in, const ChunkGrid& grid);

}  // namespace gla_ext::cuda
