#include "segments.h"

#include <algorithm>

namespace gla_ext::cuda {
namespace {

bool is_one_tile(const PlanInputs& in) { return in.K <= kTierBlock && in.V <= kTierBlock; }

// Blocks per head in the sweep that makes all gradients: a cluster of two, or one for small heads.
int64_t gradient_blocks(const PlanInputs& in) { return is_small_head(in) ? 1 : 2; }

// Blocks per sequence in a sweep of the steps: each has a tile of keys, and of values one or, in
// bf16 with vector access, two.
int64_t step_blocks(const PlanInputs& in) {
  const bool wide = in.dtype == DType::kBFloat16 && in.aligned && in.K % 8 == 0 && in.V % 8 == 0;
  return in.H * ceil_div(in.K, kTierBlock) * ceil_div(in.V, wide ? 2 * kTierBlock : kTierBlock);
}

// Blocks per sequence, in all sweeps that run at the same time.
int64_t sweep_blocks(const PlanInputs& in, Sweeps sweeps) {
  const int64_t blocks = in.H * ceil_div(in.V, kFusedValues);
  switch (sweeps) {
    case Sweeps::kForward:
      return blocks;
    case Sweeps::kStates:  // the sweeps of S and dS run side by side
      return 2 * blocks * prepared_key_blocks(in.K);
    case Sweeps::kGradients:
      return gradient_blocks(in) * in.H;
    case Sweeps::kStepStates:
      return step_blocks(in);
    case Sweeps::kStepStatesBoth:
      return 2 * step_blocks(in);
  }
  return blocks;
}

// How many resident blocks there are for each block of a sweep over whole sequences.
int64_t residents_each(const PlanInputs& in, const ChunkGrid& grid, Sweeps sweeps) {
  const int64_t blocks = grid.N * sweep_blocks(in, sweeps);
  return blocks > 0 ? resident_blocks(in, sweeps) / blocks : 0;
}

// The least number of them for which cutting repays the summaries and the scan.
int64_t fewest_residents(const PlanInputs& in, Sweeps sweeps) {
  switch (sweeps) {
    case Sweeps::kForward:  // with two, the second segment mostly replays the first
      return is_small_head(in) ? 4 : 2;
    case Sweeps::kStates:
    case Sweeps::kStepStates:  // with two, segments that are swept twice gain nothing
    case Sweeps::kStepStatesBoth:
      return 3;
    case Sweeps::kGradients:
      return 2;
  }
  return 2;
}

// Cuts packed sequences into segments of `each` chunks or slightly more. Segments that are followed
// by another of their sequence are full of tokens, however many short sequences there are. The
// device makes two, four or eight summaries of a segment if few sequences have several segments and
// there is room.
Segments cut_packed(const PlanInputs& in, Sweeps sweeps, int64_t each) {
  int64_t most = kMostSummaries;  // summaries of a segment
  const auto rounded = [&] { return ceil_div(each, most) * most; };
  while (most > 1 && (rounded() < most * kLeastSummaryChunks || 16 * (rounded() - each) > each))
    most /= 2;
  Segments cut;
  cut.segment_chunks = rounded();
  const int64_t followed = in.T / (cut.segment_chunks * kChunk);
  if (followed == 0) return {};
  cut.segments = followed + in.N + 1;
  const bool by_clusters = in.K > kTierBlock && in.K <= kGroupKeys;
  const int64_t summary_blocks = by_clusters
                                     ? 2 * ceil_div(in.V, 2 * kFusedValues)
                                     : ceil_div(in.V, kFusedValues) * prepared_key_blocks(in.K);
  cut.summaries_at_once = resident_blocks(in, sweeps) / (in.H * summary_blocks);
  // A sequence of several segments has at most twice as many states as followed segments.
  cut.segment_states = 2 * std::max(followed, std::min(most * followed, cut.summaries_at_once));
  return cut;
}

// Cuts if sweeps over whole sequences would leave multiprocessors idle: there are too few
// sequences, or they are packed and a long one might end last. Example: one sequence of 512 chunks
// with 4 heads of 256 values is 8 blocks of forward; 132 multiprocessors hold 16 times as many, so
// it becomes 16 segments of 32 chunks.
Segments cut(const PlanInputs& in, const ChunkGrid& grid, Sweeps sweeps) {
  constexpr int64_t kMinChunks = 4;  // the start of a segment costs as much as about two chunks
  if (in.batch_invariant || grid.N * in.H * in.K * in.V == 0) return {};
  const int64_t longest = ceil_div(in.T, kChunk), residents = residents_each(in, grid, sweeps);
  if (residents < fewest_residents(in, sweeps) && !in.packed) return {};
  // The lengths of packed sequences are not known here, so a segment is one block's share of all
  // chunks.
  const int64_t share =
      in.packed ? ceil_div(longest * sweep_blocks(in, sweeps), resident_blocks(in, sweeps))
                : ceil_div(longest, residents);
  const int64_t each = std::max(kMinChunks, share);
  if (longest <= each) return {};
  if (in.packed) return cut_packed(in, sweeps, each);
  Segments cut;
  cut.segment_chunks = each;
  cut.segments = cut.segment_states = ceil_div(longest, each);
  return cut;
}

// Cuts into two segments in forward. The second replays the first to sum its state, and is shorter
// for that reason. This takes less time than a kernel for the first segment's summary and a scan if
// the GPU holds no more than two blocks for each, or if sequences are short.
Segments with_replay(Segments cut, const PlanInputs& in, const ChunkGrid& grid) {
  if (cut.segments == 0 || is_small_head(in) || in.packed) return cut;
  // The second segment could write the pool's row before the first has read it.
  if (in.on_pool) return cut;
  // The first segment's share of the chunks, with which both end together: a replayed chunk takes
  // .55 of the time of another; more if fp32 gates are split, which are summed there too.
  constexpr int64_t kOf = 16;
  const bool splits_gates = in.K <= kTierBlock && in.gate_dtype == DType::kFloat;
  const int64_t first = splits_gates ? 12 : 11;
  const int64_t longest = ceil_div(in.T, kChunk);
  const int64_t residents = residents_each(in, grid, Sweeps::kForward);
  const bool many_keys = in.K > kGroupKeys;
  const bool pays = residents == 2   ? !many_keys || longest <= 64
                    : residents == 3 ? !many_keys && longest <= 32
                                     : false;
  if (!pays) return cut;
  cut.segment_chunks = ceil_div(longest * first, kOf);
  cut.segments = 2;
  cut.segment_states = 0;
  cut.replays = true;
  return cut;
}

}  // namespace

bool is_small_head(const PlanInputs& in) {
  return is_one_tile(in) && in.gate_dtype == DType::kBFloat16;
}

int64_t resident_blocks(const PlanInputs& in, Sweeps sweeps) {
  const bool steps = sweeps == Sweeps::kStepStates || sweeps == Sweeps::kStepStatesBoth;
  const bool two = steps || (sweeps == Sweeps::kForward ? is_small_head(in) : is_one_tile(in));
  return two ? 2 * in.processors : in.processors;
}

Segments in_halves(Segments cut, const PlanInputs& in) {
  if (cut.segments == 0) {
    cut.segments = cut.segment_states = 1;
    cut.segment_chunks = std::max<int64_t>(1, ceil_div(in.T, kChunk));
  }
  cut.with_last = true;
  return cut;
}

Segments choose_forward_segments(const PlanInputs& in, const ChunkGrid& grid) {
  if (in.in_halves) return in_halves(cut(in, grid, Sweeps::kForward), in);
  return with_replay(cut(in, grid, Sweeps::kForward), in, grid);
}

// Segments are swept twice, and the scan is taken to cost four chunks. Example: one sequence of 512
// chunks with 4 heads of 128 keys and 256 values is 16 blocks of forward; 132 multiprocessors hold
// 16 times as many, so it becomes 16 segments of 32 chunks.
Segments choose_step_segments(const PlanInputs& in, const ChunkGrid& grid, bool backward) {
  constexpr int64_t kScanChunks = 4;
  if (in.packed || in.value_gated) return {};
  const bool both = backward && in.dtype == DType::kBFloat16;
  const Segments found = cut(in, grid, both ? Sweeps::kStepStatesBoth : Sweeps::kStepStates);
  return 2 * found.segment_chunks + kScanChunks < ceil_div(in.T, kChunk) ? found : Segments{};
}

// Gradients are made in one sweep if its shared memory holds a head's values and is not half empty.
// In addition, nearly all resident blocks must have a head; or, where summaries are made anyway,
// segments must be long compared with the start of a sweep.
BackwardSweeps choose_backward_sweeps(const PlanInputs& in, const ChunkGrid& grid) {
  constexpr int64_t kMinSweptChunks = 32;  // of a segment
  const BackwardSweeps states{cut(in, grid, Sweeps::kStates)};
  const int64_t heads = grid.N * in.H;
  const bool fits_cluster = in.K > kTierBlock && in.K <= kGroupKeys && in.V <= 2 * kFusedValues &&
                            ceil_div(in.V, kTierBlock) % 2 == 0;
  if (!(fits_cluster || is_small_head(in)) || in.batch_invariant || heads == 0) return states;
  const BackwardSweeps swept{cut(in, grid, Sweeps::kGradients), true};
  if (swept.segments.segments == 0 && !in.packed) {
    // Three quarters of the rounds' blocks must have work. 132 multiprocessors hold 66 clusters, so
    // 64 heads are swept, but not 70, which take two rounds.
    const int64_t at_once =
        std::max<int64_t>(1, resident_blocks(in, Sweeps::kGradients) / gradient_blocks(in));
    return 4 * heads >= 3 * ceil_div(heads, at_once) * at_once ? swept : states;
  }
  const bool is_cut =
      in.packed ? states.segments.segments > 0 : residents_each(in, grid, Sweeps::kStates) >= 2;
  return is_cut && swept.segments.segment_chunks >= kMinSweptChunks ? swept : states;
}

}  // namespace gla_ext::cuda
