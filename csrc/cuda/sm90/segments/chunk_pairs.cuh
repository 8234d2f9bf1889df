// Chunk pairs: entries 2 i and 2 i + 1 of a batch row, if both belong to one sequence. The sweeps
// store only S of the first chunk and dS of the second chunk of a pair; for a chunk without a
// partner they store both. S and dS of a pair have the same index. Without packing there is one
// index per pair. In packed batches, where two neighbouring entries may both be unpaired, a pair
// uses the index of its first entry.
#pragma once

#include "segment.cuh"

namespace gla_ext::cuda::sm90 {

// A chunk's role in its pair. kAlone: the neighbouring entry belongs to another sequence or does
// not exist.
enum class Role { kAlone, kFirst, kSecond };

struct ChunkOfPair {
  Chunk chunk{};  // without tokens if the entry has no chunk
  Role role = Role::kAlone;
  int other_length = 0;  // tokens of the pair's other chunk
};

// Blocks for all pairs, two each.
inline int64_t chunk_pair_blocks(const Problem& p) {
  return p.grid.T == 0 ? 0 : 2 * blocks_of(p.grid.entries, 2) * p.grid.B * p.H;
}

// The chunk of a block. A cluster of two blocks has a pair.
__device__ __forceinline__ ChunkOfPair find_chunk_of_pair(const Problem& p, uint32_t block) {
  const ChunkGrid& grid = p.grid;
  const auto entries = static_cast<uint32_t>(grid.entries), H = static_cast<uint32_t>(p.H);
  const uint32_t pair = block / 2, row_pair = pair / H, head = pair - row_pair * H;
  const uint32_t pairs = blocks_of(entries, 2u), row = row_pair / pairs;
  const uint32_t entry = 2 * (row_pair - row * pairs) + block % 2, other = entry ^ 1;
  ChunkOfPair found;
  if (entry >= entries) return found;
  found.chunk = find_chunk(p, (row * entries + entry) * H + head);
  if (!grid.packed) found.chunk.state = pair;
  if (other >= entries || found.chunk.length == 0 || found.chunk.tail) return found;
  if (!grid.packed) {
    const int64_t left = grid.T - static_cast<int64_t>(other) * kChunk;
    found.other_length = static_cast<int>(left < kChunk ? left : kChunk);
  } else if (grid.chunk_entries[other].sequence == grid.chunk_entries[entry].sequence) {
    found.other_length = grid.chunk_entries[other].length;
  }
  if (found.other_length == 0) return found;
  found.role = entry % 2 == 0 ? Role::kFirst : Role::kSecond;
  if (grid.packed && found.role == Role::kSecond) found.chunk.state -= H;
  return found;
}

// Which S and dS of a segment's chunks the sweeps store. Without pairs they store all of them.
class ChunksOfPairs {
 public:
  __device__ __forceinline__ ChunksOfPairs(const Problem& p, const Segment& s)
      : in_pairs_(p.chunk_pairs),
        packed_(p.grid.packed),
        before_(s.first ? 0 : -1),
        behind_(s.last ? s.chunks - 1 : -1),
        entry_(s.first_entry) {
    if (!in_pairs_ || packed_) return;
    // Entries are numbered as if every row had an even number of them.
    entry_ += s.row * (p.grid.chunks & 1);
  }
  // Whether to store S of `chunk`; if not, only S of the previous chunk is needed.
  __device__ __forceinline__ bool leave_state(int chunk) const {
    return !in_pairs_ || !is_second(chunk) || chunk == before_;
  }
  // Whether to store dS of `chunk`; if not, only dS of the next chunk is needed.
  __device__ __forceinline__ bool leave_state_grad(int chunk) const {
    return !in_pairs_ || is_second(chunk) || chunk == behind_;
  }
  // The index of S and dS of `chunk` in [B, chunks], or in [B, pairs].
  __device__ __forceinline__ int64_t state(int chunk) const {
    const int64_t entry = entry_ + chunk;
    if (!in_pairs_) return entry;
    if (!packed_) return entry / 2;
    return is_second(chunk) && chunk != before_ ? entry - 1 : entry;
  }

 private:
  __device__ __forceinline__ bool is_second(int chunk) const { return (entry_ + chunk & 1) != 0; }
  bool in_pairs_, packed_;
  int before_, behind_;  // the sequence's first and last chunk if in this segment, else -1
  int64_t entry_;
};

}  // namespace gla_ext::cuda::sm90
