// gradients/chunk_pair: the data that each chunk of a pair reads from the other.
#pragma once

#include "cuda/sm90/gradients/chunk/products.cuh"
#include "cuda/sm90/segments/chunk_pairs.cuh"
#include "cuda/sm90/tiles/cluster.cuh"

namespace gla_ext::cuda::sm90::gradients::chunk_pair {

using namespace chunk;  // computes a chunk without a partner

// Entry of the pair's other chunk.
__device__ __forceinline__ int64_t other_entry(const Problem& p, const Chunk& chunk,
                                               bool is_first) {
  return chunk.entry + (is_first ? p.H : -p.H);
}

// Factors of a state between the two chunks: 2^(b_C - to) of the first and 2^from of the second.
struct PairFactors {
  static constexpr int kChannels = 2 * kGroupKeys;
  float leave[kChannels], enter[kChannels];
};

// The shared memory of a block: that of gradients/chunk and the data of the pair.
template <int kTiles>
struct PairShared : Shared<kTiles> {
  static_assert(Shared<kTiles>::kAhead && Shared<kTiles>::kInTurn);
  using Shared<kTiles>::kChannels;
  const bf16*
      other_values;  // of the other chunk, from value 0 on: do of the second, v of the first
  int other_length;
  bool is_first;
  float pass[kChannels];        // product of `leave` and `enter`
  float other_sums[kChannels];  // the other block's part of this block's rowsum(S~ dS~)
  alignas(1024) Tile other_tile;

  // The place of the other chunk's 64 values from `first` on. In every second round it is the place
  // of q^, which is copied after the values.
  __device__ __forceinline__ Tile& other(int first) {
    return first / kTile % 2 != 0 ? this->q[1] : other_tile;
  }
  // For the first chunk: A21, the scores of the second chunk's queries with this chunk's keys,
  // [second's token][token].
  __device__ __forceinline__ Tile& pair_scores() { return this->q[0]; }
  // The factors; valid until the second states are copied.
  __device__ __forceinline__ PairFactors& factors() {
    return *reinterpret_cast<PairFactors*>(&this->operands.states[1].dS[0]);
  }
  __device__ __forceinline__ int64_t other_entry(const Problem& p) const {
    return chunk_pair::other_entry(p, this->chunk, is_first);
  }
};

// Copies `leave` of entry `first` and `enter` of entry `second`.
__device__ __forceinline__ void copy_factors(PairFactors& to, const Problem& p, int64_t first,
                                             int64_t second) {
  constexpr int kThreadsEach = PairFactors::kChannels / 4;
  const int thread = thread_index(), channel = thread % kThreadsEach * 4;
  if (thread < kThreadsEach)
    copy16(shared_address(to.leave + channel), factors_at(p, first, kLeave, channel), true);
  else if (thread < 2 * kThreadsEach)
    copy16(shared_address(to.enter + channel), factors_at(p, second, kEnter, channel), true);
}

// Copies q^ or k^ of a chunk.
template <int kTiles>
__device__ __forceinline__ void copy_operand(Tile (&tiles)[kTiles], const Problem& p, int64_t entry,
                                             bool keys) {
  copy_operands(tiles, prepared_at(p, entry) + (keys ? offsetof(KeyGroup, k) : 0));
}
// Copies the operands that are needed after the sums over values: q^ of the second chunk and k^ of
// the first. The other chunk's operand takes the place of S.
template <int kTiles>
__device__ __forceinline__ void copy_operands_of_pair(PairShared<kTiles>& s, const Problem& p,
                                                      typename Shared<kTiles>::States& to) {
  copy_operand(to.S, p, s.other_entry(p), !s.is_first);
  copy_operand(to.dS, p, s.chunk.entry, s.is_first);
  commit_copies();
}

// Copies 64 values from `first` on, of both chunks, and the states' columns for them: S~ of the
// first chunk, dS~ of the second.
template <int kTiles>
__device__ __forceinline__ void copy_pair_values(PairShared<kTiles>& s, const Problem& p,
                                                 const Chunk& chunk, const Bases& bases,
                                                 const bf16* other_values, int other_length,
                                                 bool is_first, int first) {
  copy_values<kTiles>(s, p, bases, chunk.length, first);
  const Rows& rows = is_first ? p.d_o : p.v;
  const Mover<kGroupsFor<kTiles>> mover;
  const int column = first + mover.column;
  mover.template copy<kTile>(&s.other(first), other_values + token_offset(rows, mover.row) + column,
                             token_offset(rows, 1), other_length, column < p.V);
  if (threadIdx.x != 0) return;
  auto& states = s.states(first);
  const auto copy_tiles = [&](Tile(&to)[kTiles], void* from) {
    bulk_copy(to, state_tile_at(p, from, chunk.state, first / kTile, 0), sizeof(to),
              &s.full(first));
  };
  copy_tiles(states.S, p.S);
  copy_tiles(states.dS, p.dS);
}

// Loads k^ and A, for the first chunk also q^ of the second (into the place of the second states),
// and the factors between the chunks. On return the first values are still being copied.
template <int kTiles>
__device__ __forceinline__ void load_pair_operands(PairShared<kTiles>& s, const Problem& p,
                                                   const ChunkOfPair& pair) {
  const Chunk& chunk = pair.chunk;
  const bool is_first = pair.role == Role::kFirst;
  const int64_t other_entry = chunk_pair::other_entry(p, chunk, is_first);
  copy_operand(s.k, p, chunk.entry, /*keys=*/true);
  copy_scores<kTiles>(s, p, chunk);
  if (is_first) copy_operand(s.states(kTile).S, p, other_entry, /*keys=*/false);
  copy_factors(s.factors(), p, is_first ? chunk.entry : other_entry,
               is_first ? other_entry : chunk.entry);
  commit_copies();
  Chunk other = chunk;
  other.start += is_first ? kChunk : -kChunk;
  const bf16* other_values =
      is_first ? own_rows_at<const bf16>(p.d_o, other) : rows_at<const bf16>(p.v, other);
  const Bases bases{own_rows_at<const bf16>(p.d_o, chunk), rows_at<const bf16>(p.v, chunk), nullptr,
                    nullptr, own_rows_at<bf16>(p.dv, chunk)};
  if (threadIdx.x == 0) s.init_barriers();
  copy_pair_values(s, p, chunk, bases, other_values, pair.other_length, is_first, 0);
  commit_copies();
  if (threadIdx.x == 0) {
    s.chunk = chunk;
    s.bases = bases;
    s.other_values = other_values;
    s.other_length = pair.other_length;
    s.is_first = is_first;
  }
  wait_for_copies<1>();  // all but the values
}

}  // namespace gla_ext::cuda::sm90::gradients::chunk_pair
