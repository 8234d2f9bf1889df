// Shared parts of the sweeps that gate chunks themselves. A block has producer warpgroups, then
// consumer warpgroups; Unit is the part of its shared memory that differs between kernels.
#pragma once

#include "cumsum.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kGroups = 2;  // producer warpgroups, and as many consumer warpgroups
constexpr int kBlockThreads = 2 * kGroups * kGroupThreads;

template <class Unit, int kThreadsOfBlock>
struct SweepBlock {
  static constexpr int kThreads = kThreadsOfBlock;
  Tile triangle;  // ones on and below the diagonal, [token][token]
  Unit unit;
};

// The named barrier of warpgroup `group` alone. The barriers of the two or three groups are
// numbered from kFirst on.
template <int kFirst, int kOf = 2>
__device__ __forceinline__ void group_barrier(int group) {
  static_assert(kOf == 2 || kOf == 3);
  if (group == 0)
    sync_threads<kFirst>(kGroupThreads);
  else if (kOf == 2 || group == 1)
    sync_threads<kFirst + 1>(kGroupThreads);
  else
    sync_threads<kFirst + 2>(kGroupThreads);
}

// Initializes the barriers of a block's stages. Called by one thread.
template <int kProducers, int kConsumers, int kOthers = 0, class Unit>
__device__ __forceinline__ void init_stages(Unit& unit) {
  for (int stage = 0; stage < Unit::kStages; ++stage) {
    init_barrier(&unit.full[stage], kProducers * kGroupThreads);
    init_barrier(&unit.empty[stage], kConsumers * kGroupThreads + kOthers);
  }
}

// Finds segment number index / each (if kOfStates, the chunks of summary number index / each) and
// sets up the barriers and the triangle. kProducers, kConsumers: the number of warpgroups that fill
// a stage and that release it. kOthers: single threads that also release it.
template <int kProducers, int kConsumers, int kOthers = 0, bool kOfStates = false, class Block,
          class Index>
__device__ __forceinline__ void start_block(Block& s, Segment& segment, const Problem& p,
                                            Index index, int each) {
  if (threadIdx.x == 0) {
    segment = kOfStates ? find_segment_of_state(p, index / each) : find_segment(p, index / each);
    init_stages<kProducers, kConsumers, kOthers>(s.unit);
  }
  fill_triangle<Block::kThreads>(s.triangle);
  fence_for_products();
  __syncthreads();  // the barriers, the segment and the triangle are written
}

// The caller's warpgroup, producers first. One value per warp, so that the compiler sees that the
// branches of the roles do not diverge.
__device__ __forceinline__ int warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
}

}  // namespace gla_ext::cuda::sm90
