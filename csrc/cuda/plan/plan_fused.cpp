// The fused path: which kernels of sm90/ run in each pass, over which segments, and what forward
// stores for backward.
#include <algorithm>

#include "paths.h"
#include "segments.h"

namespace gla_ext::cuda {
namespace {

// Whether a cluster of two blocks can share the gating: a head must have more values than a block.
bool can_cluster(const PlanInputs& in) {
  return in.K > kTierBlock && in.K <= kGroupKeys && in.gate_dtype == DType::kBFloat16 &&
         ceil_div(in.V, kFusedValues) % 2 == 0;
}

enum class Gradients : uint8_t { kChunk, kChunkPair, kSweep, kSmallSweep };

// The choices that depend on both passes of a call; they are made here, once.
struct Choices {
  Segments forward_segments, backward_segments;
  Gradients gradients = Gradients::kChunk;
  // Whether sweeps read prepared chunks from memory; else they gate q and k themselves.
  bool forward_prepared = false, backward_prepared = false;
  bool packed_summaries = false;  // forward gates; summaries of long packed sequences
  // One kernel makes prepared chunks and summaries or, in backward of whole sequences, S.
  bool cluster_summaries = false, cluster_states = false;
};

bool sweeps_gradients(const Choices& c) {
  return c.gradients == Gradients::kSweep || c.gradients == Gradients::kSmallSweep;
}

// Chunk pairs are used where the states of all chunks would be most of what is read. With fewer
// values, the work of a pair before and after its values costs more than it saves. For 8 sequences
// of 2,048 tokens, K 256 and V 512, both passes were 1.13 times as fast.
bool pays_chunk_pairs(const PlanInputs& in, const ChunkGrid& grid) {
  constexpr int64_t kMostValues = 128;  // values
  return in.K > kGroupKeys && in.V > kMostValues && !in.batch_invariant && grid.chunks > 1;
}

// Forward gates q and k itself if K is at most 128, g is bf16 and each chunk would be gated only
// once; segments also need gating for their summaries. Most packed sequences have one segment, so
// forward then gates them too, unless the gradients need the sums of gates bit for bit as
// prepare.cu makes them.
Choices choose(const PlanInputs& in, const ChunkGrid& grid) {
  Choices c;
  c.forward_segments = choose_forward_segments(in, grid);
  const BackwardSweeps backward = choose_backward_sweeps(in, grid);
  c.backward_segments = in.in_halves ? in_halves(backward.segments, in) : backward.segments;
  const bool has_prepared = in.K > kTierBlock;
  c.backward_prepared = has_prepared;
  const bool gates = in.K <= kGroupKeys && in.gate_dtype == DType::kBFloat16;
  c.packed_summaries =
      has_prepared && gates && in.packed && c.forward_segments.segments > 0 && backward.gradients;
  c.forward_prepared =
      has_prepared && !(gates && (c.forward_segments.segments == 0 || c.packed_summaries));
  if (backward.gradients)
    c.gradients = has_prepared ? Gradients::kSweep : Gradients::kSmallSweep;
  else if (has_prepared && pays_chunk_pairs(in, grid))
    c.gradients = Gradients::kChunkPair;
  // Not if gradients are made by chunks: they need the sums of gates as prepare.cu makes them.
  const bool by_cluster = backward.gradients && can_cluster(in);
  c.cluster_states = by_cluster && c.backward_segments.segments == 0;
  c.cluster_summaries = by_cluster && !in.packed && c.backward_segments.segment_states > 0;
  return c;
}

bool cuts_alike(const Choices& c) {
  const Segments &forward = c.forward_segments, &backward = c.backward_segments;
  return forward.segments == backward.segments && forward.segment_chunks == backward.segment_chunks;
}

int64_t all_prepared_bytes(const PlanInputs& in, const ChunkGrid& grid) {
  return grid.B * grid.entries * in.H * prepared_bytes(in.K);
}
// Bytes of q, k, v and g, of H heads each.
int64_t input_bytes(const PlanInputs& in, const ChunkGrid& grid) {
  const int64_t each = bytes_of(in.dtype);
  return grid.B * in.T * in.H * (in.K * (2 * each + bytes_of(in.gate_dtype)) + in.V * each);
}
int64_t segment_state_bytes(const PlanInputs& in, int64_t segment_heads) {
  return segment_heads * in.K * in.V * kFloatBytes;
}

// Prepared chunks are stored if both passes read them from memory, or if forward has them on chip
// and a backward that sweeps gradients reads them. With many short packed sequences, or few values,
// they could be several times as large as the inputs; then nothing is stored. Nor is it in
// batch-invariant calls, whose forward has other references.
Workspace plan_for_backward(const PlanInputs& in, const ChunkGrid& grid, const Choices& c) {
  if (!in.for_backward || in.batch_invariant) return {};
  const bool in_memory = c.forward_prepared && c.backward_prepared && !c.cluster_states;
  const bool on_chip = !c.forward_prepared && c.backward_prepared && sweeps_gradients(c) &&
                       (c.backward_segments.segments == 0 || c.packed_summaries);
  if (!in_memory && !on_chip) return {};
  const int64_t most = input_bytes(in, grid);
  Workspace left;
  left.add(Buffer::kPrepared, all_prepared_bytes(in, grid));
  left.add(Buffer::kTiers, tier_bytes(grid, in.H));
  if (left.bytes() == 0 || left.bytes() > most) return {};
  const int64_t segment_heads = grid.B * c.forward_segments.segment_states * in.H;
  if (segment_heads > 0 && cuts_alike(c)) {
    Workspace more = left;
    // For last segments of packed sequences, forward makes no decays, but backward needs them.
    if (!c.packed_summaries) more.add(Buffer::kSegmentDecays, segment_heads * in.K * kFloatBytes);
    more.add(Buffer::kSegmentStates, segment_state_bytes(in, segment_heads));
    if (more.bytes() <= most) return more;
  }
  return left;
}

// How many work items each of `residents` blocks or clusters takes: the number with which the last
// one ends soonest, since the start of any further item is hidden. Packed sequences have any
// length; their items are given out one by one, unless there are many and most must be short.
int64_t items_each(const PlanInputs& in, const ChunkGrid& grid, const Segments& segments,
                   int64_t value_blocks, int64_t residents) {
  constexpr int64_t kShort = 8;   // chunks
  constexpr int64_t kRounds = 4;  // of packed sequences, so that the wait for the last is short
  const int64_t visited = segments.segments > 0 ? grid.B * segments.segments : grid.N;
  const int64_t items = visited * in.H * value_blocks;
  if (in.packed) {
    const int64_t most = grid.chunks <= kShort * visited ? kMostItems : 1;
    return std::clamp<int64_t>(items / (kRounds * residents), 1, most);
  }
  int64_t least = 0, chosen = 1;
  for (int64_t each = 1; each <= kMostItems; ++each) {
    const int64_t rounds = ceil_div(ceil_div(items, each), residents) * each;
    if (each > 1 && rounds > least) continue;
    least = rounds;
    chosen = each;
  }
  return chosen;
}
int64_t cluster_items(const PlanInputs& in, const ChunkGrid& grid, const Segments& segments) {
  return items_each(in, grid, segments, ceil_div(in.V, 2 * kFusedValues),
                    std::max<int64_t>(1, in.processors / 2));
}

// Adds the buffers of a pass, except those that forward has `left`.
void add_buffers(PassPlan& plan, const PlanInputs& in, const ChunkGrid& grid, const Workspace& left,
                 bool prepared, bool backward) {
  Workspace& w = plan.workspace = step_workspace(grid, in.H, /*tiers=*/!left.has(Buffer::kTiers));
  add_packed_lists(w, grid, plan.segments);
  const int64_t segment_heads = grid.B * plan.segments.segment_states * in.H;
  if (segment_heads > 0) {
    const int64_t states = segment_state_bytes(in, segment_heads);
    if (!left.has(Buffer::kSegmentDecays))
      w.add(Buffer::kSegmentDecays, segment_heads * in.K * kFloatBytes);
    if (!left.has(Buffer::kSegmentStates)) w.add(Buffer::kSegmentStates, states);
    if (backward) w.add(Buffer::kSegmentStateGrads, states);
  }
  if (prepared && !left.has(Buffer::kPrepared))
    w.add(Buffer::kPrepared, all_prepared_bytes(in, grid));
}

// Like add_buffers, in halves: buffers that the first half leaves for the second are in `summary`.
// The states that enter the segments are an output of forward.
void add_buffers_in_halves(PassPlan& plan, const PlanInputs& in, const ChunkGrid& grid,
                           const Workspace& left, bool prepared, bool backward) {
  Workspace &w = plan.workspace, &s = plan.summary;
  const int64_t segment_heads = grid.B * plan.segments.segment_states * in.H;
  const int64_t states = segment_state_bytes(in, segment_heads);
  if (prepared && !left.has(Buffer::kPrepared))
    s.add(Buffer::kPrepared, all_prepared_bytes(in, grid));
  if (!left.has(Buffer::kTiers)) (prepared ? s : w).add(Buffer::kTiers, tier_bytes(grid, in.H));
  if (!left.has(Buffer::kSegmentDecays))
    s.add(Buffer::kSegmentDecays, segment_heads * in.K * kFloatBytes);
  if (!left.has(Buffer::kSegmentStates)) {
    s.add(Buffer::kSummaries, states);
    if (backward) w.add(Buffer::kSegmentStates, states);
  }
  if (!backward) return;
  s.add(Buffer::kSummaryGrads, states);
  w.add(Buffer::kSegmentStateGrads, states);
}

// Adds the scan. In halves, the fold comes before it and ends the first half. A single segment
// needs no scan.
void add_scan(PassPlan& plan, const PlanInputs& in, Kernel fold, Kernel scan) {
  if (in.in_halves) {
    plan.kernels.add(fold);
    plan.summary_kernels = plan.kernels.size();
    if (plan.segments.segments == 1) return;
  }
  plan.kernels.add(scan);
}

PassPlan plan_forward(const PlanInputs& in, const ChunkGrid& grid, const Choices& c,
                      const Workspace& left) {
  const bool for_backward =
      in.in_halves ? in.for_backward && c.forward_prepared : left.has(Buffer::kPrepared);
  const bool has_summaries = c.forward_segments.segment_states > 0;
  PassPlan plan;
  plan.segments = c.forward_segments;
  if (in.in_halves)
    add_buffers_in_halves(plan, in, grid, left, c.forward_prepared, /*backward=*/false);
  else
    add_buffers(plan, in, grid, left, c.forward_prepared, /*backward=*/false);
  Recipe& kernels = plan.kernels;
  add_map(kernels, grid);
  if (c.forward_prepared) {
    // After cluster summaries forward makes A itself, which saves bytes. In other cases that would
    // take longer, as a block has few chunks, or replays those of another.
    const bool by_cluster = c.cluster_summaries && has_summaries &&
                            c.forward_segments.segments == c.backward_segments.segments;
    if (by_cluster) {
      kernels.add(for_backward ? Kernel::kSummariesCluster : Kernel::kSummariesClusterWithoutA);
      add_scan(plan, in, Kernel::kFoldAndStrongA,
               in.in_halves ? Kernel::kScan : Kernel::kScanAndStrongA);
      kernels.add(Kernel::kForwardPreparedMakingA);
      return plan;
    }
    kernels.add(Kernel::kPrepare);
    if (has_summaries) {
      kernels.add(Kernel::kSummariesPrepared);
      add_scan(plan, in, Kernel::kFold, Kernel::kScan);
    }
    kernels.add(Kernel::kForwardPrepared);
    return plan;
  }
  if (has_summaries) {
    kernels.add(c.packed_summaries ? Kernel::kSummariesPacked : Kernel::kSummariesFused);
    add_scan(plan, in, Kernel::kFold, Kernel::kScan);
  }
  if (can_cluster(in)) {
    plan.items_each = cluster_items(in, grid, plan.segments);
    kernels.add(for_backward ? Kernel::kForwardClusterForBackward : Kernel::kForwardCluster);
  } else if (is_small_head(in)) {
    plan.items_each = items_each(in, grid, plan.segments, 1, resident_blocks(in, Sweeps::kForward));
    kernels.add(Kernel::kForwardSmall);
  } else {
    kernels.add(for_backward ? Kernel::kForwardFusedForBackward : Kernel::kForwardFused);
  }
  kernels.add(for_backward ? Kernel::kStrongOutputForBackward : Kernel::kStrongOutput);
  return plan;
}

// What forward's first half has left for its second half and backward also reads. If both passes
// cut sequences alike, the state that enters each segment replaces its summary.
Workspace left_in_halves(const PlanInputs& in, const ChunkGrid& grid, const Choices& c,
                         const PassPlan& forward) {
  Workspace left = forward.summary;
  if (!in.for_backward || !c.forward_prepared || left.bytes() > input_bytes(in, grid)) return {};
  if (cuts_alike(c))
    left.reuse(Buffer::kSegmentStates, Buffer::kSummaries);
  else
    left.hide(Buffer::kSegmentDecays);
  left.hide(Buffer::kSummaries);
  return left;
}

// Adds the summaries of backward's segments and their scan. left: by forward. by_cluster: this pass
// has made the summaries of S together with the prepared chunks.
void add_backward_summaries(PassPlan& plan, const PlanInputs& in, const Choices& c,
                            const Workspace& left, bool by_cluster) {
  Recipe& kernels = plan.kernels;
  const bool has_states = left.has(Buffer::kSegmentStates);
  if (!c.backward_prepared)
    kernels.add(Kernel::kSummariesFusedBoth);
  else if (has_states && !left.has(Buffer::kSegmentDecays))
    kernels.add(Kernel::kSummariesPreparedGradsAndDecays);
  else if (has_states || by_cluster)
    kernels.add(Kernel::kSummariesPreparedGrads);
  else
    kernels.add(Kernel::kSummariesPreparedBoth);
  const Kernel fold = by_cluster ? Kernel::kFoldGradsAndStrongA : Kernel::kFoldGrads;
  add_scan(plan, in, fold, has_states ? Kernel::kScanGrads : Kernel::kScanBoth);
}

Kernel states_kernel(const Choices& c) {
  if (!c.backward_prepared)
    return sweeps_gradients(c) ? Kernel::kStatesFusedWithoutGrads : Kernel::kStatesFused;
  if (c.gradients == Gradients::kChunkPair) return Kernel::kStatesPreparedChunkPairs;
  return sweeps_gradients(c) ? Kernel::kStatesPreparedWithoutGrads : Kernel::kStatesPrepared;
}

Kernel gradients_kernel(const Choices& c) {
  switch (c.gradients) {
    case Gradients::kChunk:
      return Kernel::kGradientsChunk;
    case Gradients::kChunkPair:
      return Kernel::kGradientsChunkPair;
    case Gradients::kSweep:
      return Kernel::kGradientsSweep;
    case Gradients::kSmallSweep:
      return Kernel::kGradientsSmallSweep;
  }
  return Kernel::kGradientsChunk;
}

// Adds S and, unless it stays on chip, dS. They are tiles if chunks are prepared; each chunk pair
// has one S and one dS.
void add_backward_states(PassPlan& plan, const PlanInputs& in, const ChunkGrid& grid,
                         const Choices& c) {
  const bool by_pairs = c.gradients == Gradients::kChunkPair && !in.packed;
  const int64_t states = by_pairs ? ceil_div(grid.chunks, 2) : grid.chunks;
  const int64_t bytes = c.backward_prepared ? grid.B * states * in.H * state_tile_bytes(in.K, in.V)
                                            : chunk_state_bytes(in, grid);
  Workspace& w = plan.workspace;
  w.add(Buffer::kS, bytes);
  plan.state_bytes = bytes;
  if (sweeps_gradients(c)) return;
  w.add(Buffer::kDS, bytes);
  plan.state_bytes += bytes;
}

PassPlan plan_backward(const PlanInputs& in, const ChunkGrid& grid, const Choices& c,
                       const Workspace& left) {
  const bool has_prepared = left.has(Buffer::kPrepared);
  const bool cluster_states = c.cluster_states && !has_prepared;
  const bool cluster_summaries = c.cluster_summaries && !has_prepared;
  PassPlan plan;
  plan.segments = c.backward_segments;
  if (in.in_halves)
    add_buffers_in_halves(plan, in, grid, left, c.backward_prepared, /*backward=*/true);
  else
    add_buffers(plan, in, grid, left, c.backward_prepared, /*backward=*/true);
  Recipe& kernels = plan.kernels;
  add_map(kernels, grid);
  if (cluster_states) {
    plan.items_each = cluster_items(in, grid, plan.segments);
    kernels.add(Kernel::kStatesCluster);
  } else {
    const bool reads_A = c.gradients != Gradients::kChunk;  // gradients by chunks make A themselves
    if (cluster_summaries)
      kernels.add(Kernel::kSummariesCluster);
    else if (c.backward_prepared && !has_prepared)
      kernels.add(reads_A ? Kernel::kPrepare : Kernel::kPrepareWithoutA);
    if (c.backward_segments.segment_states > 0)
      add_backward_summaries(plan, in, c, left, cluster_summaries);
    kernels.add(states_kernel(c));
  }
  // prepare.cu makes these gradients for its chunks itself, but not in halves: the first half makes
  // only A.
  if (has_prepared || (in.in_halves && c.backward_prepared))
    kernels.add(Kernel::kStrongGradientsWithoutA);
  else if (!c.backward_prepared || cluster_states || cluster_summaries)
    kernels.add(Kernel::kStrongGradients);
  kernels.add(gradients_kernel(c));

  add_backward_states(plan, in, grid, c);
  // Only chunks with strong gates use these buffers. A of prepared chunks is part of the chunks.
  const int64_t token_heads = grid.B * in.T * in.H;
  Workspace& w = plan.workspace;
  if (!c.backward_prepared)
    w.add(Buffer::kA, token_heads * kChunk * bytes_of(intermediate_dtype(in.dtype)));
  add_intra(w, in, token_heads * in.K * kFloatBytes);
  return plan;
}

}  // namespace

CallPlan plan_fused(const PlanInputs& in, const ChunkGrid& grid) {
  CallPlan plan;
  plan.path = Path::kFused;
  const Choices choices = choose(in, grid);
  if (in.in_halves) {
    plan.forward = plan_forward(in, grid, choices, {});
    plan.for_backward = left_in_halves(in, grid, choices, plan.forward);
  } else {
    plan.for_backward = plan_for_backward(in, grid, choices);
    plan.forward = plan_forward(in, grid, choices, plan.for_backward);
  }
  plan.backward = plan_backward(in, grid, choices, plan.for_backward);
  return plan;
}

}  // namespace gla_ext::cuda
