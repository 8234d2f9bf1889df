// What the sweeps that gate on their way share: a block of producer and consumer warpgroups,
// producers first, and its shared memory, a Unit.
#pragma once

#include "cumsum.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kGroups = 2;  // warpgroups of either role
constexpr int kBlockThreads = 2 * kGroups * kGroupThreads;

template <class Unit, int kThreadsOfBlock>
struct SweepBlock {
  static constexpr int kThreads = kThreadsOfBlock;
  Tile triangle;  // of ones, [token][token]
  Unit unit;
};

// A named barrier of one warpgroup; those of two or three warpgroups have numbers from kFirst on.
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

// Sets the barriers of a block's stages, by one thread.
template <int kProducers, int kConsumers, int kOthers = 0, class Unit>
__device__ __forceinline__ void init_stages(Unit& unit) {
  for (int stage = 0; stage < Unit::kStages; ++stage) {
    init_barrier(&unit.full[stage], kProducers * kGroupThreads);
    init_barrier(&unit.empty[stage], kConsumers * kGroupThreads + kOthers);
  }
}

// Finds segment number index / each (kOfStates: a summary's segment) and makes what all warpgroups
// need. kProducers, kConsumers: warpgroups that fill and leave a stage; kOthers: single threads
// that leave it too.
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
  __syncthreads();  // the barriers, the segment and the triangle are there
}

// The caller's warpgroup, producers first: one value a warp, so that the compiler knows that the
// roles' branches do not diverge.
__device__ __forceinline__ int warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
}

}  // namespace gla_ext::cuda::sm90
