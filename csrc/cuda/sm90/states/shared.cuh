// The shared memory of a block of states.cu.
#pragma once

#include "../sweep.cuh"
#include "sweeps.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// Of a unit's two producers; of a producer, two of them.
constexpr int kProducerBarrier = 1, kGatingBarrier = 2;

// A segment and head, worked on by kMembers warpgroups of either role: two, or one of two units.
template <int kWarpgroups>
struct alignas(1024) Unit {
  static constexpr int kMembers = kWarpgroups;
  static constexpr int kValues = kMembers * kTile;
  struct Stage {
    unsigned char y[kTileBytes];             // k or q [token][K], then gated
    unsigned char g[kTileBytes];             // [token][K]
    unsigned char x[kMembers * kTileBytes];  // v or do [token][V]
  } stages[kStages];
  unsigned char state[kMembers * kTileBytes];  // [K][V]
  float b_last[kTile];                         // log2 units
  float decay[kStages][kTile];                 // 2^b_C
  uint64_t full[kStages], empty[kStages];
  int exact[kStages];
  Segment segment;
};

}  // namespace
}  // namespace gla_ext::cuda::sm90
