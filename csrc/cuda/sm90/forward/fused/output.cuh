// How the forward sweeps write rows of o.
#pragma once

#include "barriers.cuh"
#include "cuda/sm90/tiles/sweep.cuh"

namespace gla_ext::cuda::sm90::forward {

// Stores x^T [64 values][64 rows] of a warpgroup to a tile, as rows of 64 values.
__device__ __forceinline__ void store_transposed_tile(
    Tile& tile, const float* x, int of_block = static_cast<int>(threadIdx.x)) {
  const int thread = of_block % kGroupThreads, lane = thread % 32;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int row = 8 * j + lane % 8 + lane / 16 * 8, part = thread / 32 * 2 + lane / 8 % 2;
    store_transposed(shared_address(&tile) + swizzled(row, part), pack(x[4 * j], x[4 * j + 1]),
                     pack(x[4 * j + 2], x[4 * j + 3]), pack(x[4 * j + 4], x[4 * j + 5]),
                     pack(x[4 * j + 6], x[4 * j + 7]));
  }
}

// Stores o^T [64 values][64 tokens] of a warpgroup to the tile of its v, as rows.
__device__ __forceinline__ void place_output(Tile& tile, const float (&o)[32], int group) {
  group_barrier<kConsumerBarrier>(group);  // v is read
  store_transposed_tile(tile, o);
  group_barrier<kConsumerBarrier>(group);  // o is written
}

// The part that a thread writes to memory: 16 bytes of every sixteenth row.
struct OutputPart {
  static constexpr int kRows = 4;
  int thread = static_cast<int>(threadIdx.x);  // of the block, or of its warpgroup

  __device__ __forceinline__ int part() const { return thread % 8; }
  __device__ __forceinline__ int token(int i) const { return thread % kGroupThreads / 8 + 16 * i; }
  __device__ __forceinline__ uint4 row(const Tile& tile, int i) const {
    return in_tile<uint4>(tile, swizzled(token(i), part()));
  }
  // Writes row(i) to each of this thread's rows that the chunk has.
  template <class Row>
  __device__ __forceinline__ void write(const Problem& p, const Segment& segment, int chunk,
                                        int first_v, Row&& row) const {
    bf16* out = rows_at<bf16>(p.o, segment.row, segment.token_of(chunk), segment.head);
    const int length = segment.length_of(chunk);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int column = first_v + 8 * part();
      if (token(i) < length && column < p.V)
        *reinterpret_cast<uint4*>(out + token_offset(p.o, token(i)) + column) = row(i);
    }
  }
};

// Calls place_output, then stores the rows to memory.
__device__ __forceinline__ void store_output(Tile& tile, const float (&o)[32], int group,
                                             const Problem& p, const Segment& segment, int chunk,
                                             int first_v) {
  const OutputPart part{static_cast<int>(threadIdx.x) % kGroupThreads};
  place_output(tile, o, group);
  part.write(p, segment, chunk, first_v, [&](int i) { return part.row(tile, i); });
}

// store_output in two steps, between which the stage of a chunk can be released. If the stage is
// released before both, store_output is faster, as it loads each row just before its store.
class OutputRows {
 public:
  __device__ __forceinline__ OutputRows(Tile& tile, const float (&o)[32], int group) {
    place_output(tile, o, group);
#pragma unroll
    for (int i = 0; i < OutputPart::kRows; ++i) words_[i] = OutputPart().row(tile, i);
  }
  __device__ __forceinline__ void write(const Problem& p, const Segment& segment, int chunk,
                                        int first_v) const {
    OutputPart().write(p, segment, chunk, first_v, [&](int i) { return words_[i]; });
  }

 private:
  uint4 words_[OutputPart::kRows];
};

// Records for strong/output.cu how many of a chunk's last rows are strong.
__device__ __forceinline__ void write_tier(const Problem& p, const Segment& segment, int chunk,
                                           int strong_rows) {
  *reinterpret_cast<uint64_t*>(p.tiers + segment.chunk_head(p, chunk) * kMaxTierBlocks) =
      static_cast<uint64_t>(strong_rows);
}

// Writes zeros to the rows of o after the last sequence of a packed batch, and to those of a
// sequence that is skipped.
__device__ __forceinline__ void write_tail(const Problem& p, const Segment& segment, int first_v) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  // A skipped sequence has no strong chunks.
  if (p.tiers != nullptr && p.prepared == nullptr && is_on_pool(p) && first_v == 0)
    for (int chunk = thread; chunk < segment.chunks; chunk += kGroupThreads)
      write_tier(p, segment, chunk, 0);
  const int column = first_v + thread % 8 * 8;
  if (column >= p.V) return;
  bf16* o = rows_at<bf16>(p.o, segment.row, segment.start, segment.head) + column;
  const int64_t end =
      segment.chunks * kChunk < segment.length ? segment.chunks * kChunk : segment.length;
  for (int64_t token = thread / 8; token < end; token += kGroupThreads / 8)
    *reinterpret_cast<uint4*>(o + token * p.o.stride_t) = make_uint4(0, 0, 0, 0);
}

}  // namespace gla_ext::cuda::sm90::forward
