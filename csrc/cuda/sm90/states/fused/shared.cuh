// The shared memory of a block of states/fused.
#pragma once

#include "barriers.cuh"
#include "cuda/sm90/tiles/sweep.cuh"
#include "sweeps.cuh"

namespace gla_ext::cuda::sm90::states::fused {

constexpr int kProducers = 2;

// Memory for one segment and head. A block has two producers and one or two consumers, one for
// every 64 values.
template <int kWarpgroups, class Gate>
struct alignas(1024) Unit {
  static constexpr int kConsumers = kWarpgroups, kStages = 3;
  static constexpr int kValues = kConsumers * kTile;
  struct Stage {
    Tile y;                    // k or q [token][K], gated in place
    Tile g[kGateTiles<Gate>];  // [token][K]; fp32: two tiles
    Tile x[kConsumers];        // v or do [token][V]
  } stages[kStages];
  Tile state[kConsumers];        // [K][V]
  float b_last[kStages][kTile];  // log2 units
  uint64_t full[kStages], empty[kStages];
  int strong[kStages];
  Segment segment;
};

template <int kConsumers, class Gate>
using Block = SweepBlock<Unit<kConsumers, Gate>, (kProducers + kConsumers) * kGroupThreads>;

}  // namespace gla_ext::cuda::sm90::states::fused
