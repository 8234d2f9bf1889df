// From block indices to the part of a sequence that a sweep goes over.
#pragma once

#include "../device/chunk.cuh"

namespace gla_ext::cuda::sm90 {

// Some chunks of one sequence and head, one after the other; all of them where sequences are not
// cut. Of the first `prefix` of these, which are others' too, a sweep makes the state alone.
struct Segment {
  int64_t n, row;
  int64_t start, length;  // tokens
  int64_t first_slot;     // of its first chunk in S and, of packed batches, ChunkSlot
  // Of its own parts' matrices in segment_states, the first and the last, where its sequence has
  // several.
  int64_t state, last_state;
  int chunks, prefix, head;
  bool first, last;  // of its sequence
  bool tail;         // tokens behind the last sequence

  __device__ __forceinline__ int length_of(int chunk) const {
    const int64_t left = length - chunk * kChunk;
    return static_cast<int>(left < kChunk ? left : kChunk);
  }
  __device__ __forceinline__ int64_t token_of(int chunk) const { return start + chunk * kChunk; }
  // Of (row, slot, head) in `tiers`, and of the matrix in S and dS.
  __device__ __forceinline__ int64_t chunk_head(const Problem& p, int chunk) const {
    return (first_slot + chunk) * p.H + head;
  }
};

// Segments of all batch rows and heads, those of the tokens behind packed sequences included.
__host__ __device__ inline int64_t segment_heads(const ChunkGrid& grid, int64_t H) {
  return H * (grid.segment_chunks > 0 ? grid.B * grid.segments : grid.N + grid.packed);
}

// Part `part`, of `each` chunks, of sequence n, whose chunks are 0 where the sequence has no such
// part. part_chunks: of each of its own parts.
__device__ __forceinline__ Segment segment_at(const Problem& p, int64_t n, int64_t part,
                                              int64_t each, int64_t part_chunks, int head) {
  const ChunkGrid& grid = p.grid;
  const Sequence sequence = find_sequence(p, n);
  const int64_t chunks = blocks_of(sequence.length, kChunk);
  if (each == 0) each = part_chunks = chunks;
  const int64_t done = part * each, left = chunks - done;
  const int64_t own = left <= 0 ? 0 : left < each ? left : each;
  const int64_t prefix = grid.prefixed ? done : 0, skipped = done - prefix;
  Segment s;
  s.head = head;
  s.n = n;
  s.row = grid.packed ? 0 : n;
  s.start = sequence.start + skipped * kChunk;
  s.length = sequence.length - skipped * kChunk;
  s.first_slot = sequence.first_slot + skipped;
  s.chunks = static_cast<int>(prefix + own);
  s.prefix = static_cast<int>(prefix);
  const bool has_parts = part_chunks < each;
  const int64_t state = sequence.first_state + (has_parts ? done / part_chunks : part);
  const int64_t more = has_parts ? (own - 1) / part_chunks : 0;
  s.state = state * p.H + head;
  s.last_state = (state + more) * p.H + head;
  s.first = skipped == 0;
  s.last = left <= each;
  s.tail = n == grid.N;
  return s;
}

// What a block has that is not needed: as tokens behind the last sequence, of which there are none.
__device__ __forceinline__ Segment no_segment() {
  Segment s{};
  s.tail = true;
  return s;
}

// The last packed sequence n for which first(n) is not behind `index`.
template <class First>
__device__ __forceinline__ int64_t find_packed(const ChunkGrid& grid, int64_t index,
                                               First&& first) {
  int64_t low = 0, high = grid.N;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first(middle) <= index)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// Number `index` of segments and heads, the longest first: of packed sequences, whose lengths
// differ, those that others of a sequence follow, which are all as long, then the last ones.
__device__ __forceinline__ Segment find_segment(const Problem& p, int64_t index) {
  const ChunkGrid& grid = p.grid;
  const int64_t slot = index / p.H;
  const auto head = static_cast<int>(index - slot * p.H);
  int64_t n = slot, part = 0;
  if (grid.packed) {
    const PackedTotals totals = *grid.totals;
    const int64_t last = slot - totals.followed;
    if (last > grid.N) return no_segment();
    if (last >= 0) {
      n = grid.by_last_segment[last];
      const int64_t chunks = blocks_of(grid.sequences[n].length, kChunk);
      if (chunks > grid.segment_chunks && grid.segment_chunks > 0)
        part = blocks_of(chunks, grid.segment_chunks) - 1;
    } else {
      const auto before = [&](int64_t n) { return grid.sequences[n].first_segment - n; };
      n = find_packed(grid, slot, before);
      part = slot - before(n);
    }
    return segment_at(p, n, part, grid.segment_chunks, totals.part_chunks, head);
  }
  if (grid.segment_chunks > 0) {
    n = slot / grid.segments;
    part = slot - n * grid.segments;
  }
  return segment_at(p, n, part, grid.segment_chunks, grid.segment_chunks, head);
}

// Whether number `index` of states and heads is any segment's. Few are where packed sequences are
// short.
__device__ __forceinline__ bool has_state(const Problem& p, int64_t index) {
  return !p.grid.packed || index / p.H < p.grid.totals->states;
}

// The chunks whose own part is number `index` of these, as a segment.
__device__ __forceinline__ Segment find_segment_of_state(const Problem& p, int64_t index) {
  if (!p.grid.packed) return find_segment(p, index);
  if (!has_state(p, index)) return no_segment();
  const Sequence* sequences = p.grid.sequences;
  const int64_t state = index / p.H;
  const int64_t n = find_packed(p.grid, state, [=](int64_t n) { return sequences[n].first_state; });
  const int64_t part_chunks = p.grid.totals->part_chunks;
  return segment_at(p, n, state - sequences[n].first_state, part_chunks, part_chunks,
                    static_cast<int>(index - state * p.H));
}
// Of all batch rows and heads.
__host__ __device__ inline int64_t segment_state_heads(const ChunkGrid& grid, int64_t H) {
  return grid.B * grid.segment_states * H;
}

}  // namespace gla_ext::cuda::sm90
