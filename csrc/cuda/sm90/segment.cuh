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

// Number `index` of them; its chunks are 0 where no sequence needs it. An index behind the last is
// a tail without tokens.
__device__ __forceinline__ Segment find_segment(const Problem& p, int64_t index) {
  const ChunkGrid& grid = p.grid;
  int64_t n = index / p.H, part = 0;
  Segment s;
  if (index >= segment_heads(grid, p.H)) {
    s.chunks = 0;
    s.length = 0;
    s.tail = true;
    return s;
  }
  s.head = static_cast<int>(index - n * p.H);
  if (grid.segment_chunks > 0) {
    const int64_t slot = n;
    if (grid.packed) {  // the last sequence whose first segment is not behind this one
      int64_t low = 0, high = grid.N;
      while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (grid.sequences[middle].first_segment <= slot)
          low = middle;
        else
          high = middle - 1;
      }
      n = low;
      part = slot - grid.sequences[n].first_segment;
    } else {
      n = slot / grid.segments;
      part = slot - n * grid.segments;
    }
  }
  const Sequence sequence = find_sequence(p, n);
  const int64_t chunks = blocks_of(sequence.length, kChunk);
  const int64_t each = grid.segment_chunks > 0 ? grid.segment_chunks : chunks;
  const int64_t done = part * each, left = chunks - done;
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

}  // namespace gla_ext::cuda::sm90
