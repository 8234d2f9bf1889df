// q^, k^ and A of a chunk and head as prepare.cu, states/cluster.cu or a forward sweep that gates
// leaves them in memory: tiles as warpgroup products read them, which are copied whole.
#pragma once

#include "cuda/sm90/tiles/tiles.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kKeyTiles = kGroupKeys / kTile;
// Of operands that hold kTiles tiles of 64 key channels; the last one may have one.
template <int kTiles>
constexpr int kGroupsOf = (kTiles + kKeyTiles - 1) / kKeyTiles;

// What a key channel of the state is multiplied by as it passes a chunk: 2^from as it enters, 1 or
// 2^b_C before the product, 2^(b_C - r) or 1 as it leaves. kSum is b_C itself, log2 units.
enum Factor { kEnter, kMiddle, kLeave, kSum, kFactors };

// The factors stand between q^ and k^, so that either comes with them in one piece. A second tile
// of which no key channel is there (`has_second_tile`) is neither written nor read.
struct alignas(1024) KeyGroup {
  unsigned char q[kKeyTiles * kTileBytes];  // q^ [token][128]
  float factors[kFactors][kGroupKeys];
  unsigned char k[kKeyTiles * kTileBytes];  // k^ [token][128]
};
constexpr int kFlagBytes = 16;  // of `strong` as it is copied
constexpr int kFactorBytes = sizeof(KeyGroup::factors);

// Of the group of key channels from `first` on. What reads operands has kernels for either.
__device__ __forceinline__ bool has_second_tile(const Problem& p, int first) {
  return first + kTile < p.K;
}

// A of other chunks is there for who reads it (Problem::with_A), sweeps and gradients of pairs
// of chunks; and outside tier 1, behind states/cluster.cu from strong/gradients.cu or
// segments/scan.cu, behind forward sweeps from strong/output.cu; `strong`, 1 if the chunk is
// outside, for sweeps alone.
template <int kGroups>
struct alignas(1024) PreparedChunk {
  KeyGroup groups[kGroups];
  unsigned char A[kTileBytes];  // [token][token]
  int strong;

  static constexpr int kBytes = kGroups * sizeof(KeyGroup) + kTileBytes + kFlagBytes;
  static_assert(kBytes <= prepared_bytes(kGroups * kGroupKeys));
};

// prepare.cu writes one part behind the other.
static_assert(offsetof(PreparedChunk<2>, A) == 2 * sizeof(KeyGroup));
static_assert(offsetof(PreparedChunk<2>, strong) == offsetof(PreparedChunk<2>, A) + kTileBytes);

// Number `index` of [B, slots, H]; `group`: of its 128 key channels.
__device__ __forceinline__ unsigned char* prepared_at(const Problem& p, int64_t index,
                                                      int group = 0) {
  return p.prepared + index * prepared_bytes(p.K) + group * static_cast<int64_t>(sizeof(KeyGroup));
}

// The key channels from `channel` on of a factor of chunk `slot`, as far as their 128.
__device__ __forceinline__ const float* factors_at(const Problem& p, int64_t slot, Factor factor,
                                                   int channel) {
  const auto* group = reinterpret_cast<const KeyGroup*>(prepared_at(p, slot, channel / kGroupKeys));
  return group->factors[factor] + channel % kGroupKeys;
}

}  // namespace gla_ext::cuda::sm90
