// The shared memory of a block of forward/fused and forward/small.cu.
#pragma once

#include "barriers.cuh"
#include "cuda/sm90/tiles/gating.cuh"
#include "cuda/sm90/tiles/sweep.cuh"

namespace gla_ext::cuda::sm90::forward {

// Memory for one segment and head, or for up to kItems of these in sequence. Each of kConsumers
// warpgroups has 64 value channels. As many chunks are gated at the same time as there are
// consumers.
template <int K, int kConsumers, int kItems = 1, class Gate = bf16>
struct alignas(1024) Unit {
  static constexpr int kValues = kConsumers * kTile;
  // There are four stages only where shared memory has room. A producer then copies its next rows
  // while it gates. Such segments may start with replayed chunks, over which only the state is
  // summed.
  static constexpr bool kAhead = K == kTile && kConsumers == kGroups;
  static constexpr int kStages = kAhead ? 4 : 3;
  struct Stage {
    Tile q[K / kTile];                     // [token][K], replaced by q^
    Tile k[K / kTile];                     // [token][K], replaced by k^
    Tile g[K / kTile * kGateTiles<Gate>];  // [token][K] (fp32: two tiles), replaced by A
    Tile v[kConsumers];                    // [token][V], replaced by o
  } stages[kStages];
  // Factors of the state's key channels at a chunk. enter: 2^r. middle, before the product is
  // added: 1, or 2^b_C if out of range. leave: 2^(b_C - r), or 1 if out of range.
  float enter[kStages][K], middle[kStages][K], leave[kStages][K];
  alignas(16) float pass[kConsumers][K];  // of each consumer, see `Passage`
  float b_last[kConsumers][K];            // of the chunk that is being gated, log2 units
  float2 references[kConsumers][K];       // q^ = q 2^(b - x) and k^ = k 2^(x + y - b)
  uint64_t full[kStages], empty[kStages];
  int strong[kStages][kStrong<kGroups / kConsumers>];
  Segment segments[kItems];
};

}  // namespace gla_ext::cuda::sm90::forward
