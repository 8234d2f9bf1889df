// Chunk pairs: slots 2 i and 2 i + 1 of a batch row, where both are of one sequence. Of a pair the
// sweeps leave only the first chunk's S and the second's dS; of a chunk without a neighbour both. S
// and dS of a pair have the same index: one index a pair, or in packed batches, where neighbouring
// chunks may both be alone, the first of their two.
#pragma once

#include "segment.cuh"

namespace gla_ext::cuda::sm90 {

// A chunk's role in its pair. kAlone: its neighbour is of another sequence, or not there.
enum class Role { kAlone, kFirst, kSecond };

struct ChunkOfPair {
  Chunk chunk{};  // without tokens where there is none
  Role role = Role::kAlone;
  int other_length = 0;  // tokens of the other chunk
};

// Blocks for all of them, two a pair.
inline int64_t chunk_pair_blocks(const Problem& p) {
  return p.grid.T == 0 ? 0 : 2 * blocks_of(p.grid.slots, 2) * p.grid.B * p.H;
}

// The chunk of a block; its cluster has the pair.
__device__ __forceinline__ ChunkOfPair find_chunk_of_pair(const Problem& p, uint32_t block) {
  const ChunkGrid& grid = p.grid;
  const auto slots = static_cast<uint32_t>(grid.slots), H = static_cast<uint32_t>(p.H);
  const uint32_t pair = block / 2, row_pair = pair / H, head = pair - row_pair * H;
  const uint32_t pairs = blocks_of(slots, 2u), row = row_pair / pairs;
  const uint32_t slot = 2 * (row_pair - row * pairs) + block % 2, other = slot ^ 1;
  ChunkOfPair found;
  if (slot >= slots) return found;
  found.chunk = find_chunk(p, (row * slots + slot) * H + head);
  if (!grid.packed) found.chunk.state = pair;
  if (other >= slots || found.chunk.length == 0 || found.chunk.tail) return found;
  if (!grid.packed) {
    const int64_t left = grid.T - static_cast<int64_t>(other) * kChunk;
    found.other_length = static_cast<int>(left < kChunk ? left : kChunk);
  } else if (grid.chunk_slots[other].sequence == grid.chunk_slots[slot].sequence) {
    found.other_length = grid.chunk_slots[other].length;
  }
  if (found.other_length == 0) return found;
  found.role = slot % 2 == 0 ? Role::kFirst : Role::kSecond;
  if (grid.packed && found.role == Role::kSecond) found.chunk.state -= H;
  return found;
}

// Which S and dS of a segment's chunks the sweeps leave: all of them where chunks are not paired.
class ChunksOfPairs {
 public:
  __device__ __forceinline__ ChunksOfPairs(const Problem& p, const Segment& s)
      : in_pairs_(p.chunk_pairs),
        packed_(p.grid.packed),
        before_(s.first ? 0 : -1),
        behind_(s.last ? s.chunks - 1 : -1),
        slot_(s.first_slot) {
    if (!in_pairs_ || packed_) return;
    // Numbered as if every row had an even number of slots.
    slot_ += s.row * (p.grid.chunks & 1);
  }
  // Whether S of `chunk` is left, rather than only that of the chunk before.
  __device__ __forceinline__ bool leave_state(int chunk) const {
    return !in_pairs_ || !is_second(chunk) || chunk == before_;
  }
  // Whether dS of `chunk` is left, rather than only that of the chunk after.
  __device__ __forceinline__ bool leave_state_grad(int chunk) const {
    return !in_pairs_ || is_second(chunk) || chunk == behind_;
  }
  // Where S and dS of `chunk` are, of [B, chunks] or of as many pairs.
  __device__ __forceinline__ int64_t state(int chunk) const {
    const int64_t slot = slot_ + chunk;
    if (!in_pairs_) return slot;
    if (!packed_) return slot / 2;
    return is_second(chunk) && chunk != before_ ? slot - 1 : slot;
  }

 private:
  __device__ __forceinline__ bool is_second(int chunk) const { return (slot_ + chunk & 1) != 0; }
  bool in_pairs_, packed_;
  int before_, behind_;  // the sequence's first and last chunk, where in this segment
  int64_t slot_;
};

}  // namespace gla_ext::cuda::sm90
