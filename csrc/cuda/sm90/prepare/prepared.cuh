// A prepared chunk: q^, k^, A and the factors of a chunk and head in memory, as written by
// prepare.cu, states/cluster.cu or a forward sweep that gates. Its tiles have the layout that
// warpgroup products read and are copied whole.
#pragma once

#include "cuda/sm90/tiles/tiles.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kKeyTiles = kGroupKeys / kTile;
// Groups of 128 key channels that hold kTiles tiles of 64; the last group may have one tile.
template <int kTiles>
constexpr int kGroupsOf = (kTiles + kKeyTiles - 1) / kKeyTiles;

// The factors that multiply a key channel of the state while it passes a chunk. kEnter: 2^from, on
// entering. kMiddle: 1, or 2^b_C if the channel is out of range, before the product is added.
// kLeave: 2^(b_C - r), or 1 if out of range, on leaving. kSum is b_C itself, in log2 units.
enum Factor { kEnter, kMiddle, kLeave, kSum, kFactors };

// The factors are between q^ and k^, so that one copy takes the factors with either. A second tile
// without key channels (see `has_second_tile`) is neither written nor read.
struct alignas(1024) KeyGroup {
  Tile q[kKeyTiles];  // q^ [token][128]
  float factors[kFactors][kGroupKeys];
  Tile k[kKeyTiles];  // k^ [token][128]
};
constexpr int kFlagBytes = 16;  // bytes copied of `strong`
constexpr int kFactorBytes = sizeof(KeyGroup::factors);

// Whether the group of key channels that starts at `first` has a second tile. Kernels that read
// prepared chunks come in both forms.
__device__ __forceinline__ bool has_second_tile(const Problem& p, int first) {
  return first + kTile < p.K;
}

// A is present if Problem::with_A, for sweeps and for gradients of chunk pairs. A of strong chunks
// is written later: after states/cluster.cu by strong/gradients.cu or segments/scan.cu, after
// forward sweeps by strong/output.cu. `strong` is 1 for a strong chunk; only sweeps read it.
template <int kGroups>
struct alignas(1024) PreparedChunk {
  KeyGroup groups[kGroups];
  Tile A;  // [token][token]
  int strong;

  static constexpr int kBytes = kGroups * sizeof(KeyGroup) + kTileBytes + kFlagBytes;
  static_assert(kBytes <= prepared_bytes(kGroups * kGroupKeys));
};

// prepare.cu computes the addresses of A and `strong` from this order.
static_assert(offsetof(PreparedChunk<2>, A) == 2 * sizeof(KeyGroup));
static_assert(offsetof(PreparedChunk<2>, strong) == offsetof(PreparedChunk<2>, A) + kTileBytes);

// The prepared chunk number `index` of [B, entries, H], from its group number `group` of 128 key
// channels on.
__device__ __forceinline__ unsigned char* prepared_at(const Problem& p, int64_t index,
                                                      int group = 0) {
  return p.prepared + index * prepared_bytes(p.K) + group * static_cast<int64_t>(sizeof(KeyGroup));
}

// A factor of chunk `entry`, for the key channels from `channel` to the end of their group.
__device__ __forceinline__ const float* factors_at(const Problem& p, int64_t entry, Factor factor,
                                                   int channel) {
  const auto* group =
      reinterpret_cast<const KeyGroup*>(prepared_at(p, entry, channel / kGroupKeys));
  return group->factors[factor] + channel % kGroupKeys;
}

}  // namespace gla_ext::cuda::sm90
