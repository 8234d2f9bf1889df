// Finds chunks and sequences from block indices, and their rows in a tensor.
#pragma once

#include "element.cuh"

namespace gla_ext::cuda {

// The two sweeps over the chunks of a sequence: of the state, first chunk first, or of its
// gradient, last chunk first.
enum class Sweep { kStates, kStateGrads };

struct Chunk {
  int64_t row, start;  // batch row, first token
  int32_t length;      // tokens; 0: the entry is not used by a sequence
  int32_t head;
  int64_t entry;  // index of (row, entry, head) in `tiers`
  int64_t state;  // index of the [K, V] matrix in S and dS; of a chunk pair the pair's
  bool tail;      // tokens after the last sequence: results are zero
};

// The number of tiles, or of blocks of threads, that cover `columns`.
template <class T, class Tile>
__host__ __device__ constexpr auto blocks_of(T columns, Tile tile) {
  return (columns + tile - 1) / tile;
}

// The chunk number `index` of [B, entries, H]. The host keeps the index within a grid's 31 bits;
// 32-bit divisions are faster.
template <class Index>
__device__ __forceinline__ Chunk find_chunk(const Problem& p, Index index) {
  const ChunkGrid& grid = p.grid;
  const Index row_entry = index / static_cast<Index>(p.H);
  const auto head = static_cast<int32_t>(index - row_entry * static_cast<Index>(p.H));
  if (grid.packed) {
    const ChunkEntry entry = grid.chunk_entries[row_entry];
    return {0, entry.start, entry.length, head, index, index, entry.sequence == grid.N};
  }
  const Index entries = static_cast<Index>(grid.entries), row = row_entry / entries;
  const int64_t start = static_cast<int64_t>(row_entry - row * entries) * kChunk;
  const int64_t left = grid.T - start;
  return {row,   start, static_cast<int32_t>(left < kChunk ? left : kChunk), head, index,
          index, false};
}

// Start and length of sequence n, and its first indices.
__device__ __forceinline__ Sequence find_sequence(const Problem& p, int64_t n) {
  if (p.grid.packed) return p.grid.sequences[n];
  return {0, p.grid.T, n * p.grid.chunks, n * p.grid.segments, n * p.grid.segments};
}

// Offset in elements from a tensor's first head to the head that `head` reads.
__device__ __forceinline__ int64_t head_offset(const Rows& r, int32_t head) {
  return static_cast<int64_t>(static_cast<uint32_t>(head) * r.group_reciprocal >> 32) * r.stride_h;
}

template <class T>
__device__ __forceinline__ T* rows_at(const Rows& r, int64_t row, int64_t token, int32_t head) {
  return static_cast<T*>(r.data) + row * r.stride_b + token * r.stride_t + head_offset(r, head);
}
template <class T>
__device__ __forceinline__ T* rows_at(const Rows& r, const Chunk& chunk) {
  return rows_at<T>(r, chunk.row, chunk.start, chunk.head);
}

// rows_at for tensors without shared heads. It computes less, for code that calls it often.
template <class T>
__device__ __forceinline__ T* own_rows_at(const Rows& r, const Chunk& chunk) {
  return static_cast<T*>(r.data) + chunk.row * r.stride_b + chunk.start * r.stride_t +
         chunk.head * r.stride_h;
}

// Offset in elements from a chunk's first token to another of its tokens. The host copies or
// rejects tensors whose strides need more than 32 bits.
__device__ __forceinline__ int32_t token_offset(const Rows& r, int32_t token) {
  return token * static_cast<int32_t>(r.stride_t);
}

// Offset in elements of a chunk's first token, for tensors of any dtype.
__device__ __forceinline__ int64_t offset_at(const Rows& r, const Chunk& chunk) {
  return chunk.row * r.stride_b + chunk.start * r.stride_t + head_offset(r, chunk.head);
}

// Writes zeros to columns [first, end) of a chunk's rows of an output.
template <int kThreads>
__device__ __forceinline__ void write_zeros(const Rows& r, const Chunk& chunk, int first, int end) {
  const int64_t base = offset_at(r, chunk);
  const int columns = end - first;
  for (int i = threadIdx.x; i < chunk.length * columns; i += kThreads)
    store_any(r.data, r.dtype, base + i / columns * r.stride_t + first + i % columns, 0.f);
}

}  // namespace gla_ext::cuda
