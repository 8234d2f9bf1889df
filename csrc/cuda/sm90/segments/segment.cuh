// Finds the segment that a block sweeps over from the block's index.
#pragma once

#include "cuda/device/chunk.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/device/states.cuh"

namespace gla_ext::cuda::sm90 {

// Consecutive chunks of one sequence and head; all of the sequence's chunks if it is not cut. The
// first `replayed` chunks belong to earlier segments: a sweep only sums the state over them.
struct Segment {
  int64_t n, row;
  int64_t start, length;  // tokens
  int64_t first_entry;    // of its first chunk, in S and in a packed batch's chunk_entries
  // Indices in segment_states of its first and last summary; set only if the sequence has several
  // segments.
  int64_t state, last_state;
  int chunks, replayed, head;
  bool first, last;  // of the sequence
  bool tail;         // tokens after the last sequence, or a sequence that is skipped

  __device__ __forceinline__ int length_of(int chunk) const {
    const int64_t left = length - chunk * kChunk;
    return static_cast<int>(left < kChunk ? left : kChunk);
  }
  __device__ __forceinline__ int64_t token_of(int chunk) const { return start + chunk * kChunk; }
  // Index of (row, entry, head) in `tiers`, and of the chunk's matrix in S and dS.
  __device__ __forceinline__ int64_t chunk_head(const Problem& p, int chunk) const {
    return (first_entry + chunk) * p.H + head;
  }
};

// The number of segments of all batch rows and heads, including those of the tokens after the last
// packed sequence.
__host__ __device__ inline int64_t segment_heads(const ChunkGrid& grid, int64_t H) {
  return H * (grid.segment_chunks > 0 ? grid.B * grid.segments : grid.N + grid.packed);
}

// The counts below have 32 bits, like a grid's number of blocks: 64-bit divisions are function
// calls, which take registers from the whole kernel.
__device__ __forceinline__ uint32_t chunks_of(const Sequence& sequence) {
  return static_cast<uint32_t>(static_cast<uint64_t>(sequence.length + kChunk - 1) / kChunk);
}

// Part number `part` of sequence n, where a part is `each` chunks. Has no chunks if the sequence
// has no such part. summary_chunks: chunks per summary.
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
  s.first_entry = sequence.first_entry + skipped;
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
// first come the segments that another one follows, which are all of full length, then the last
// segment of each sequence. kMayBeOnPool is false for gradients, which are never on a pool and have
// no registers left for the test.
template <bool kMayBeOnPool = true>
__device__ __forceinline__ Segment find_segment(const Problem& p, int64_t index) {
  const ChunkGrid& grid = p.grid;
  const auto i = static_cast<uint32_t>(index), H = static_cast<uint32_t>(p.H);
  const auto each = static_cast<uint32_t>(grid.segment_chunks);
  const uint32_t entry = i / H, head = i - entry * H;
  uint32_t n = entry, part = 0, summary_chunks = each;
  if (grid.packed) {
    const auto followed = static_cast<uint32_t>(grid.totals->followed);
    summary_chunks = static_cast<uint32_t>(grid.totals->summary_chunks);
    if (entry >= followed) {
      // On a pool, the sequences that the recurrence takes come last, so one comparison finds them.
      if (kMayBeOnPool ? entry - followed >= grid.totals->visited : entry - followed > grid.N)
        return no_segment();
      n = grid.by_last_segment[entry - followed];
      const uint32_t chunks = chunks_of(grid.sequences[n]);
      if (each > 0 && chunks > each) part = (chunks - 1) / each;
    } else {
      const auto before = [&](uint32_t n) {
        return static_cast<uint32_t>(grid.sequences[n].first_segment) - n;
      };
      n = find_packed(grid, entry, before);
      part = entry - before(n);
    }
  } else if (each > 0) {
    n = entry / static_cast<uint32_t>(grid.segments);
    part = entry - n * static_cast<uint32_t>(grid.segments);
  }
  return segment_at<kMayBeOnPool>(p, n, part, each, summary_chunks, head);
}

// Whether summary and head number `index` exists. There are few if packed sequences are short.
__device__ __forceinline__ bool has_state(const Problem& p, int64_t index) {
  return !p.grid.packed || index < p.grid.totals->states * p.H;
}

// The chunks that summary and head number `index` covers, as a segment.
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
// The number of summaries of all batch rows and heads.
__host__ __device__ inline int64_t segment_state_heads(const ChunkGrid& grid, int64_t H) {
  return grid.B * grid.segment_states * H;
}

// Loads four values of a channel of an initial or final state, or 0 if there is no such state.
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

// Whether a first segment starts from the scan's copy of the initial state. By the time this
// segment starts, the sequence's last segment may have overwritten the row of the pool.
__device__ __forceinline__ bool starts_from_scan(const Problem& p, const Segment& segment) {
  return is_on_pool(p) && segment.first && !segment.last;
}

// The place for the state after `chunk`, if a checkpoint ends there. chunk may be -1: no chunk.
__device__ __forceinline__ StateMatrix checkpoint_after(const Problem& p, const Segment& segment,
                                                        int chunk) {
  if (p.pool.checkpoint_chunks == 0 || chunk < 0) return {};
  if ((chunk + 1) * kChunk > segment.length) return {};
  const int64_t before = segment.first_entry - find_sequence(p, segment.n).first_entry;
  return checkpoint_of(p, segment.n, (before + chunk + 1) * kChunk, segment.head);
}

}  // namespace gla_ext::cuda::sm90
