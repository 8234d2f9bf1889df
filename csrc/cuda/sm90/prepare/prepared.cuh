// A prepared chunk: q^, k^, A and factors of a chunk and head as prepare.cu, states/cluster.cu or a
// forward sweep that gates leaves them in memory, tiles as warpgroup products read them, which are
// copied whole.
#pragma once

#include "cuda/sm90/tiles/tiles.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kKeyTiles = kGroupKeys / kTile;
// Groups of 128 key channels that hold kTiles tiles of 64; the last group may have one tile.
template <int kTiles>
constexpr int kGroupsOf = (kTiles + kKeyTiles - 1) / kKeyTiles;

// What a key channel of the state is multiplied by as it passes a chunk: 2^from as it enters;
// before the product 1, or 2^b_C if out of range; 2^(b_C - r) as it leaves, or 1 if out of range.
// kSum is b_C itself, log2 units.
enum Factor { kEnter, kMiddle, kLeave, kSum, kFactors };

// The factors stand between q^ and k^, so that one copy takes either with them. A second tile
// without key channels (`has_second_tile`) is neither written nor read.
struct alignas(1024) KeyGroup {
  Tile q[kKeyTiles];  // q^ [token][128]
  float factors[kFactors][kGroupKeys];
  Tile k[kKeyTiles];  // k^ [token][128]
};
constexpr int kFlagBytes = 16;  // what is copied of `strong`
constexpr int kFactorBytes = sizeof(KeyGroup::factors);

// Whether the group of key channels from `first` on has one. Readers of prepared chunks have
// kernels for either.
__device__ __forceinline__ bool has_second_tile(const Problem& p, int first) {
  return first + kTile < p.K;
}

// A is there where Problem::with_A says so, for sweeps and gradients of chunk pairs. That of strong
// chunks comes after states/cluster.cu from strong/gradients.cu or segments/scan.cu, after forward
// sweeps from strong/output.cu. `strong`, 1 for a strong chunk, is read by sweeps alone.
template <int kGroups>
struct alignas(1024) PreparedChunk {
  KeyGroup groups[kGroups];
  Tile A;  // [token][token]
  int strong;

  static constexpr int kBytes = kGroups * sizeof(KeyGroup) + kTileBytes + kFlagBytes;
  static_assert(kBytes <= prepared_bytes(kGroups * kGroupKeys));
};

// prepare.cu writes one after the other.
static_assert(offsetof(PreparedChunk<2>, A) == 2 * sizeof(KeyGroup));
static_assert(offsetof(PreparedChunk<2>, strong) == offsetof(PreparedChunk<2>, A) + kTileBytes);

// Number `index` of [B, slots, H]; `group`: which 128 key channels.
__device__ __forceinline__ unsigned char* prepared_at(const Problem& p, int64_t index,
                                                      int group = 0) {
  return p.prepared + index * prepared_bytes(p.K) + group * static_cast<int64_t>(sizeof(KeyGroup));
}

// A factor of chunk `slot`, key channels from `channel` to the end of their group.
__device__ __forceinline__ const float* factors_at(const Problem& p, int64_t slot, Factor factor,
                                                   int channel) {
  const auto* group = reinterpret_cast<const KeyGroup*>(prepared_at(p, slot, channel / kGroupKeys));
  return group->factors[factor] + channel % kGroupKeys;
}

}  // namespace gla_ext::cuda::sm90
