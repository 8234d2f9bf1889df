#include "plan_segments.h"

#include <algorithm>

namespace gla_ext::cuda {
namespace {

bool is_one_tile(const PlanInputs& in) { return in.K <= kTierBlock && in.V <= kTierBlock; }

// Of a head or segment, in a sweep that makes all gradients.
int64_t swept_blocks(const PlanInputs& in) { return is_narrow(in) ? 1 : 2; }

// Of one sequence, in all sweeps that run at a time.
int64_t sweep_blocks(const Plan& plan, const PlanInputs& in) {
  const int64_t blocks = in.H * ceil_div(in.V, kFusedValues);
  if (plan.swept_gradients) return swept_blocks(in) * in.H;
  constexpr int64_t kEachWay = 2;  // backward sweeps states and their gradients at a time
  return in.backward ? kEachWay * blocks * linear_key_blocks(in.K) : blocks;
}

// How many places there are for each block of a sweep over whole sequences.
int64_t places_each(const Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  const int64_t blocks = grid.N * sweep_blocks(plan, in);
  return blocks > 0 ? sweep_places(in) / blocks : 0;
}

// Of these, the fewest with which segments pay for their own parts and the scan; in forward, but of
// narrow heads, two, of which `choose_prefixes` takes most.
int64_t fewest_places(const Plan& plan, const PlanInputs& in) {
  if (in.backward) return plan.swept_gradients ? 2 : 3;
  return is_narrow(in) ? 4 : 2;
}

// Segments of `each` chunks or hardly more, of which the device makes two, four or eight own parts
// where few sequences have several segments and there are places for as many.
void cut_packed(Plan& plan, const PlanInputs& in, const ChunkGrid& grid, int64_t each) {
  int64_t most = kMostParts;  // own parts of a segment
  const auto rounded = [&] { return ceil_div(each, most) * most; };
  while (most > 1 && (rounded() < most * kLeastPartChunks || 16 * (rounded() - each) > each))
    most /= 2;
  plan.segment_chunks = rounded();
  plan.segments = grid.slots / plan.segment_chunks + in.N + 1;
  const bool by_pairs = in.K > kTierBlock && in.K <= kOperandKeys;  // of blocks
  const int64_t part_blocks = by_pairs ? 2 * ceil_div(in.V, 2 * kFusedValues)
                                       : ceil_div(in.V, kFusedValues) * linear_key_blocks(in.K);
  plan.parts_at_once = sweep_places(in) / (in.H * part_blocks);
  // A sequence of several segments has at most twice as many states as segments that are followed.
  const int64_t followed = grid.slots / plan.segment_chunks;
  plan.segment_states = 2 * std::max(followed, std::min(most * followed, plan.parts_at_once));
}

}  // namespace

bool is_narrow(const PlanInputs& in) {
  return is_one_tile(in) && in.gate_dtype == DType::kBFloat16;
}

int64_t sweep_places(const PlanInputs& in) {
  return (in.backward ? is_one_tile(in) : is_narrow(in)) ? 2 * in.processors : in.processors;
}

void choose_segments(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  constexpr int64_t kMinChunks = 4;  // a segment's start costs as much as about two chunks
  plan.segments = plan.segment_chunks = plan.segment_states = plan.parts_at_once = 0;
  if (in.batch_invariant || grid.N * in.H * in.K * in.V == 0) return;
  const int64_t longest = ceil_div(in.T, kChunk), each_has = places_each(plan, in, grid);
  if (each_has < fewest_places(plan, in) && !in.packed) return;
  // Packed, nothing is known of the lengths: a segment is what a place would get of all chunks.
  const int64_t share = in.packed ? ceil_div(longest * sweep_blocks(plan, in), sweep_places(in))
                                  : ceil_div(longest, each_has);
  const int64_t each = std::max(kMinChunks, share);
  if (longest <= each) return;
  if (in.packed)
    cut_packed(plan, in, grid, each);
  else
    plan.segments = plan.segment_states = ceil_div(longest, plan.segment_chunks = each);
}

void choose_sweep(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  constexpr int64_t kMinSweptChunks = 32;  // of a segment
  choose_segments(plan, in, grid);
  const int64_t heads = grid.N * in.H;
  const bool fits_cluster = in.K > kTierBlock && in.K <= kOperandKeys && in.V <= 2 * kFusedValues &&
                            ceil_div(in.V, kTierBlock) % 2 == 0;
  if (!(fits_cluster || is_narrow(in)) || in.batch_invariant || heads == 0) return;
  const bool cut = in.packed ? plan.segments > 0 : places_each(plan, in, grid) >= 2;
  Plan swept = plan;
  swept.swept_gradients = true;
  choose_segments(swept, in, grid);
  if (swept.segments == 0 && !in.packed) {
    const int64_t at_once = std::max<int64_t>(1, sweep_places(in) / swept_blocks(in));
    const int64_t places = ceil_div(heads, at_once) * at_once;
    if (4 * heads >= 3 * places) plan = swept;
  } else if (cut && swept.segment_chunks >= kMinSweptChunks) {
    plan = swept;
  }
}

Plan backward_sweep(PlanInputs in, const ChunkGrid& grid) {
  in.backward = true;
  Plan backward;
  choose_sweep(backward, in, grid);
  return backward;
}

void choose_prefixes(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  if (plan.segments == 0 || is_narrow(in) || in.packed) return;
  // The share with which both segments end together. A chunk before a segment's own takes .55 of
  // the time of another; where fp32 gates are split and summed there too, it takes more.
  constexpr int64_t kOf = 16;
  const bool splits_gates = in.K <= kTierBlock && in.gate_dtype == DType::kFloat;
  const int64_t first = splits_gates ? 12 : 11;
  const int64_t longest = ceil_div(in.T, kChunk), places = places_each(plan, in, grid);
  const bool many_keys = in.K > kOperandKeys;
  const bool pays =
      places == 2 ? !many_keys || longest <= 64 : places == 3 && !many_keys && longest <= 32;
  if (!pays) return;
  plan.segment_chunks = ceil_div(longest * first, kOf);
  plan.segments = 2;
  plan.segment_states = 0;
  plan.prefixed = true;
}

}  // namespace gla_ext::cuda
