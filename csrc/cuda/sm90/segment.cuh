// From block indices to the part of a sequence that a sweep goes over.
#pragma once

#include "../device/chunk.cuh"

namespace gla_ext::cuda::sm90 {

// Some chunks of one sequence and head, one after the other; all of them where sequences are not
// cut.
struct Segment {
  int64_t n, row;
  int64_t start, length;  // tokens
  int64_t first_slot;     // of its first chunk in S and, of packed batches, ChunkSlot
  int64_t state;          // of its matrix in segment_states, where its sequence has others
  int chunks, head;
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

// Part `part` of sequence n, whose chunks are 0 where the sequence has no such part.
__device__ __forceinline__ Segment segment_at(const Problem& p, int64_t n, int64_t part, int head) {
  const ChunkGrid& grid = p.grid;
  const Sequence sequence = find_sequence(p, n);
  const int64_t chunks = blocks_of(sequence.length, kChunk);
  const int64_t each = grid.segment_chunks > 0 ? grid.segment_chunks : chunks;
  const int64_t done = part * each, left = chunks - done;
  Segment s;
  s.head = head;
  s.n = n;
  s.row = grid.packed ? 0 : n;
  s.start = sequence.start + done * kChunk;
  s.length = sequence.length - done * kChunk;
  s.first_slot = sequence.first_slot + done;
  s.chunks = static_cast<int>(left <= 0 ? 0 : left < each ? left : each);
  s.state = (sequence.first_state + part) * p.H + s.head;
  s.first = part == 0;
  s.last = left <= each;
  s.tail = n == grid.N;
  return s;
}

// The last packed sequence for which first(sequence) is not behind `slot`.
template <class First>
__device__ __forceinline__ int64_t find_packed(const ChunkGrid& grid, int64_t slot, First&& first) {
  int64_t low = 0, high = grid.N;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first(grid.sequences[middle]) <= slot)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// Number `index` of them; its chunks are 0 where no sequence needs it. An index behind the last is
// a tail without tokens.
__device__ __forceinline__ Segment find_segment(const Problem& p, int64_t index) {
  const ChunkGrid& grid = p.grid;
  int64_t n = index / p.H, part = 0;
  if (index >= segment_heads(grid, p.H)) {
    Segment s;
    s.chunks = 0;
    s.length = 0;
    s.tail = true;
    return s;
  }
  const auto head = static_cast<int>(index - n * p.H);
  if (grid.segment_chunks > 0) {
    const int64_t slot = n;
    if (grid.packed) {
      n = find_packed(grid, slot, [](const Sequence& s) { return s.first_segment; });
      part = slot - grid.sequences[n].first_segment;
    } else {
      n = slot / grid.segments;
      part = slot - n * grid.segments;
    }
  }
  return segment_at(p, n, part, head);
}

// The segment whose state is number `index`; where none has it, one that is skipped as a tail is.
__device__ __forceinline__ Segment find_segment_of_state(const Problem& p, int64_t index) {
  if (!p.grid.packed) return find_segment(p, index);
  const int64_t state = index / p.H;
  const int64_t n = find_packed(p.grid, state, [](const Sequence& s) { return s.first_state; });
  Segment s = segment_at(p, n, state - p.grid.sequences[n].first_state,
                         static_cast<int>(index - state * p.H));
  s.tail |= s.chunks == 0 || (s.first && s.last);
  return s;
}
// Of all batch rows and heads.
__host__ __device__ inline int64_t segment_state_heads(const ChunkGrid& grid, int64_t H) {
  return grid.B * grid.segment_states * H;
}

}  // namespace gla_ext::cuda::sm90
