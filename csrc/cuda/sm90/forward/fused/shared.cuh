// The shared memory of a block of forward/fused and forward/small.cu.
#pragma once

#include "barriers.cuh"
#include "cuda/sm90/tiles/sweep.cuh"

namespace gla_ext::cuda::sm90::forward {

// For a segment and head, or up to kItems of these one after the other; each of kConsumers
// warpgroups has 64 values. Producers gate as many chunks at a time as there are consumers.
template <int K, int kConsumers, int kItems = 1, class Gate = bf16>
struct alignas(1024) Unit {
  static constexpr int kValues = kConsumers * kTile;
  // With four stages, for which other shapes have no room, a producer asks for its next rows while
  // it gates. Such segments may start with replayed chunks, over which only the state is summed.
  static constexpr bool kAhead = K == kTile && kConsumers == kGroups;
  static constexpr int kStages = kAhead ? 4 : 3;
  struct Stage {
    Tile q[K / kTile];                     // [token][K], then q^
    Tile k[K / kTile];                     // [token][K], then k^
    Tile g[K / kTile * kGateTiles<Gate>];  // [token][K], fp32 in two tiles, then A
    Tile v[kConsumers];                    // [token][V], then o
  } stages[kStages];
  // Factors of the state's key channels at a chunk: 2^r as it enters; before the product 1, or
  // 2^b_C if out of range; 2^(b_C - r) as it leaves.
  float enter[kStages][K], middle[kStages][K], leave[kStages][K];
  alignas(16) float pass[kConsumers][K];  // of a consumer, see `Passage`
  float b_last[kConsumers][K];            // of the chunk that is gated, log2 units
  float2 references[kConsumers][K];       // q^ = q 2^(b - x) and k^ = k 2^(x + y - b)
  uint64_t full[kStages], empty[kStages];
  int strong[kStages];
  Segment segments[kItems];
};

}  // namespace gla_ext::cuda::sm90::forward
