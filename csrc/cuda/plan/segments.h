// Decides whether and where sweeps cut sequences into segments, to fill the GPU.
#pragma once

#include "plan.h"

namespace gla_ext::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The sweeps that visit segments. kForward: forward's. kStates: those of backward that make S and
// dS. kGradients: the one of backward that makes all gradients, with dS on chip. kStepStates: the
// steps' of S or of dS. kStepStatesBoth: these two side by side.
enum class Sweeps : uint8_t { kForward, kStates, kGradients, kStepStates, kStepStatesBoth };

// Whether heads have at most 64 keys and 64 values (one tile), and bf16 gates. Forward and the
// gradients have special kernels for such heads.
bool is_small_head(const PlanInputs& in);

// How many blocks of these sweeps the GPU holds at a time: two per multiprocessor for small heads,
// in backward for all heads of one tile, and in the steps; else one.
int64_t resident_blocks(const PlanInputs& in, Sweeps sweeps);

// In halves every segment has a summary. Sequences that are not cut become a single segment each.
Segments in_halves(Segments cut, const PlanInputs& in);

Segments choose_forward_segments(const PlanInputs& in, const ChunkGrid& grid);

Segments choose_step_segments(const PlanInputs& in, const ChunkGrid& grid, bool backward);

// Backward makes gradients in one sweep with dS on chip, or by a kernel over chunks that reads dS
// from memory.
struct BackwardSweeps {
  Segments segments;
  bool gradients = false;  // in one sweep
};
BackwardSweeps choose_backward_sweeps(const PlanInputs& in, const ChunkGrid& grid);

}  // namespace gla_ext::cuda
