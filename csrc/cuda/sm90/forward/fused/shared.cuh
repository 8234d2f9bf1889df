// The shared memory of a block of forward/fused and forward/small.cu.
#pragma once

#include "barriers.cuh"
#include "cuda/sm90/tiles/sweep.cuh"

namespace gla_ext::cuda::sm90::forward {

// A segment and head, or up to kItems of these one after the other, of which each of kConsumers
// warpgroups has 64 values. As many chunks are gated at a time.
template <int K, int kConsumers, int kItems = 1, class Gate = bf16>
struct alignas(1024) Unit {
  static constexpr int kValues = kConsumers * kTile;
  // With four stages, for which others have no room, a producer's next rows come while it gates.
  // Segments may then have chunks before their own, of which the state alone is made.
  static constexpr bool kAhead = K == kTile && kConsumers == kGroups;
  static constexpr int kStages = kAhead ? 4 : 3;
  struct Stage {
    unsigned char q[K / 64 * kTileBytes];  // [token][K], then q^
    unsigned char k[K / 64 * kTileBytes];  // [token][K], then k^
    // [token][K], fp32 in two tiles, then A
    unsigned char g[K / 64 * kGateTiles<Gate> * kTileBytes];
    unsigned char v[kConsumers * kTileBytes];  // [token][V], then o
  } stages[kStages];
  // Factors of the state's key channels at a chunk: 2^r as it enters; before the product, 1 or
  // 2^b_C; 2^(b_C - r) as it leaves.
  float enter[kStages][K], middle[kStages][K], leave[kStages][K];
  alignas(16) float pass[kConsumers][K];  // of a consumer, see `Passage`
  float b_last[kConsumers][K];            // of a chunk that is gated, log2 units
  float2 references[kConsumers][K];       // q^ = q 2^(b - x) and k^ = k 2^(x + y - b)
  uint64_t full[kStages], empty[kStages];
  int strong[kStages];
  Segment segments[kItems];
};

}  // namespace gla_ext::cuda::sm90::forward
