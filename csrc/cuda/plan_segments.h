// Whether and how a plan of the fused path cuts sequences into segments, and whether it sweeps
// gradients, of which the other depends.
#pragma once

#include "plan.h"

namespace gla_ext::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Heads of at most 64 keys and 64 values, one tile, with bf16 gates: of these forward and gradients
// have sweeps of their own.
bool is_narrow(const PlanInputs& in);
// Blocks of sweeps at a time: two a multiprocessor of narrow heads, and in backward of all of one
// tile.
int64_t sweep_places(const PlanInputs& in);

// Cuts sequences into segments where sweeps over whole ones would leave multiprocessors idle: by
// themselves too few, or packed ones of which a long one would be left over.
void choose_segments(Plan& plan, const PlanInputs& in, const ChunkGrid& grid);

// Two segments in forward of which the second sums the first's state by itself, and is the shorter
// for it: where there are no more places, or sequences are short, that takes less than the first's
// own part by a kernel of its own and a scan.
void choose_prefixes(Plan& plan, const PlanInputs& in, const ChunkGrid& grid);

// Gradients in a sweep with dS on chip, by a cluster of two blocks a head, or one block of two a
// multiprocessor for a narrow one, or a kernel over chunks that reads it from memory: the sweep
// where its shared memory holds a head's values and is not half empty, and nearly all places have a
// head; or a segment that is long beside a sweep's start, where segments' own parts are summed
// anyway, as of packed batches, whose lengths nobody knows here.
void choose_sweep(Plan& plan, const PlanInputs& in, const ChunkGrid& grid);

// Of backward's plan what `choose_sweep` makes of it.
Plan backward_sweep(PlanInputs in, const ChunkGrid& grid);

}  // namespace gla_ext::cuda
