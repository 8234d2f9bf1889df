// From block indices to the segment of a sequence that a sweep goes over.
#pragma once

#include "cuda/device/chunk.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/device/states.cuh"

namespace gla_ext::cuda::sm90 {

// Some chunks of one sequence and head, one after the other; all of them where sequences are not
// cut. The first `replayed` belong to the segments before: a sweep only sums the state over them.
struct Segment {
  int64_t n, row;
  int64_t start, length;  // tokens
  int64_t first_slot;     // of its first chunk in S and, of packed batches, ChunkSlot
  // The first and last of its summaries in segment_states; only where its sequence has several
  // segments.
  int64_t state, last_state;
  int chunks, replayed, head;
  bool first, last;  // of its sequence
  bool tail;         // tokens after the last sequence, or of one that is skipped

  __device__ __forceinline__ int length_of(int chunk) const {
    const int64_t left = length - chunk * kChunk;
    return static_cast<int>(left < kChunk ? left : kChunk);
  }
  __device__ __forceinline__ int64_t token_of(int chunk) const { return start + chunk * kChunk; }
  // Index of (row, slot, head) in `tiers`, and of the matrix in S and dS.
  __device__ __forceinline__ int64_t chunk_head(const Problem& p, int chunk) const {
    return (first_slot + chunk) * p.H + head;
  }
};

// Segments of all batch rows and heads, including those of the tokens after the last packed
// sequence.
__host__ __device__ inline int64_t segment_heads(const ChunkGrid& grid, int64_t H) {
  return H * (grid.segment_chunks > 0 ? grid.B * grid.segments : grid.N + grid.packed);
}

// Counts below have 32 bits, as a grid's blocks do: 64-bit divisions are calls, which take
// registers from the whole kernel.
__device__ __forceinline__ uint32_t chunks_of(const Sequence& sequence) {
  return static_cast<uint32_t>(static_cast<uint64_t>(sequence.length + kChunk - 1) / kChunk);
}

// Part number `part`, of `each` chunks, of sequence n; without chunks where the sequence has no
// such part. summary_chunks: chunks of a summary.
template <bool kMayBeOnPool = true>
__device__ __forceinline__ Segment segment_at(const Problem& p, uint32_t n, uint32_t part,
                                              uint32_t each, uint32_t summary_chunks,
                                              uint32_t head) {
  const ChunkGrid& grid = p.grid;
  const Sequence sequence = find_sequence(p, n);
  const uint32_t chunks = chunks_of(sequence);
  if (each == 0) each = summary_chunks = chunks;
  const uint32_t done = part * each, left = done < chunks ? chunks - done : 0;
  const uint32_t own = left < each ? left : each;
  const uint32_t replayed = grid.replays ? done : 0, skipped = done - replayed;
  const bool has_several = summary_chunks < each;
  const uint32_t before = has_several ? done / summary_chunks : part;
  const uint32_t more = has_several && own > 0 ? (own - 1) / summary_chunks : 0;
  Segment s;
  s.head = static_cast<int>(head);
  s.n = n;
  s.row = grid.packed ? 0 : n;
  s.start = sequence.start + static_cast<int64_t>(skipped) * kChunk;
  s.length = sequence.length - static_cast<int64_t>(skipped) * kChunk;
  s.first_slot = sequence.first_slot + skipped;
  s.chunks = static_cast<int>(replayed + own);
  s.replayed = static_cast<int>(replayed);
  s.state = (sequence.first_state + before) * p.H + head;
  s.last_state = (sequence.first_state + before + more) * p.H + head;
  s.first = skipped == 0;
  s.last = left <= each;
  s.tail = n == grid.N || (kMayBeOnPool && is_skipped(p, n));
  return s;
}

// The empty segment, for a block without work.
__device__ __forceinline__ Segment no_segment() {
  Segment s{};
  s.tail = true;
  return s;
}

// Segment and head number `index`, the longest segments first. Packed sequences differ in length:
// first come segments that another follows, which are all of full length, then each sequence's last
// one. Gradients are never on a pool, and have no registers to ask.
template <bool kMayBeOnPool = true>
__device__ __forceinline__ Segment find_segment(const Problem& p, int64_t index) {
  const ChunkGrid& grid = p.grid;
  const auto i = static_cast<uint32_t>(index), H = static_cast<uint32_t>(p.H);
  const auto each = static_cast<uint32_t>(grid.segment_chunks);
  const uint32_t slot = i / H, head = i - slot * H;
  uint32_t n = slot, part = 0, summary_chunks = each;
  if (grid.packed) {
    const auto followed = static_cast<uint32_t>(grid.totals->followed);
    summary_chunks = static_cast<uint32_t>(grid.totals->summary_chunks);
    if (slot >= followed) {
      // On a pool the sequences that the recurrence takes come last: found out at once.
      if (kMayBeOnPool ? slot - followed >= grid.totals->visited : slot - followed > grid.N)
        return no_segment();
      n = grid.by_last_segment[slot - followed];
      const uint32_t chunks = chunks_of(grid.sequences[n]);
      if (each > 0 && chunks > each) part = (chunks - 1) / each;
    } else {
      const auto before = [&](uint32_t n) {
        return static_cast<uint32_t>(grid.sequences[n].first_segment) - n;
      };
      n = find_packed(grid, slot, before);
      part = slot - before(n);
    }
  } else if (each > 0) {
    n = slot / static_cast<uint32_t>(grid.segments);
    part = slot - n * static_cast<uint32_t>(grid.segments);
  }
  return segment_at<kMayBeOnPool>(p, n, part, each, summary_chunks, head);
}

// Whether summary and head number `index` exists. Few do where packed sequences are short.
__device__ __forceinline__ bool has_state(const Problem& p, int64_t index) {
  return !p.grid.packed || index < p.grid.totals->states * p.H;
}

// The chunks of summary and head number `index`, as a segment.
__device__ __forceinline__ Segment find_segment_of_state(const Problem& p, int64_t index) {
  if (!p.grid.packed) return find_segment(p, index);
  if (!has_state(p, index)) return no_segment();
  const Sequence* sequences = p.grid.sequences;
  const auto i = static_cast<uint32_t>(index), H = static_cast<uint32_t>(p.H);
  const uint32_t state = i / H;
  const auto first = [=](uint32_t n) { return static_cast<uint32_t>(sequences[n].first_state); };
  const uint32_t n = find_packed(p.grid, state, first);
  const auto summary_chunks = static_cast<uint32_t>(p.grid.totals->summary_chunks);
  return segment_at(p, n, state - first(n), summary_chunks, summary_chunks, i - state * H);
}
// Summaries of all batch rows and heads.
__host__ __device__ inline int64_t segment_state_heads(const ChunkGrid& grid, int64_t H) {
  return grid.B * grid.segment_states * H;
}

// Four values of a channel of an initial or final state, 0 of none.
__device__ __forceinline__ float4 load_boundary(const Problem& p, const StateMatrix& state, int k,
                                                int v) {
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (state.data == nullptr) return x;
  state.with_elements([&](const auto* elements) {
    const auto* at = elements + (p.state_v_first ? v * p.K + k : k * p.V + v);
    if (sizeof(*at) == sizeof(float) && !p.state_v_first &&
        reinterpret_cast<uintptr_t>(at) % sizeof(float4) == 0) {
      x = *reinterpret_cast<const float4*>(at);
    } else {
      const int step = p.state_v_first ? p.K : 1;
      x = make_float4(to_float(at[0]), to_float(at[step]), to_float(at[2 * step]),
                      to_float(at[3 * step]));
    }
  });
  return x;
}

// Whether a first segment starts from what the scan has read: by the time that it starts, its
// sequence's last segment may have written the pool's row.
__device__ __forceinline__ bool starts_from_scan(const Problem& p, const Segment& segment) {
  return is_on_pool(p) && segment.first && !segment.last;
}

// Where the state after a chunk of a segment, -1 being none, is kept.
__device__ __forceinline__ StateMatrix checkpoint_after(const Problem& p, const Segment& segment,
                                                        int chunk) {
  if (p.pool.checkpoint_chunks == 0 || chunk < 0) return {};
  if ((chunk + 1) * kChunk > segment.length) return {};
  const int64_t before = segment.first_slot - find_sequence(p, segment.n).first_slot;
  return checkpoint_of(p, segment.n, (before + chunk + 1) * kChunk, segment.head);
}

}  // namespace gla_ext::cuda::sm90
