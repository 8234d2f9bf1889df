// Shared by the sweeps over prepared chunks, forward/prepared.cu and states/prepared.cu: a block of
// one producer warpgroup and some consumer warpgroups, which works on one segment and head.
#pragma once

#include "cuda/sm90/tiles/sweep.cuh"
#include "prepared.cuh"

namespace gla_ext::cuda::sm90 {

template <class StageOfBlock, int kStagesOfBlock, int kConsumers>
struct PreparedBlock {
  static constexpr int kStages = kStagesOfBlock;
  StageOfBlock stages[kStages];
  uint64_t full[kStages], empty[kStages];
  Segment segment;

  __device__ __forceinline__ static uint32_t parity(int i) {
    return static_cast<uint32_t>(i / kStages) & 1;
  }

  // Finds segment number `index` (if kOfStates, the chunks of summary number `index`) and sets up
  // the barriers. bulk_copies: how many bulk copies `full` counts for a stage.
  template <bool kOfStates = false>
  __device__ __forceinline__ void start(const Problem& p, int64_t index, int bulk_copies = 1) {
    if (threadIdx.x == 0) {
      segment = kOfStates ? find_segment_of_state(p, index) : find_segment(p, index);
      for (int stage = 0; stage < kStages; ++stage) {
        init_barrier(&full[stage], kGroupThreads + bulk_copies);
        init_barrier(&empty[stage], kConsumers * kGroupThreads);
      }
    }
    fence_for_products();  // also for bulk copies
    __syncthreads();       // the barriers and the segment are written
  }

  // Fills the stages; runs on the producer. Calls copy(i, stage, barrier) for the i-th chunk, and
  // prepare(i) once this thread's copies of it have arrived. `prepare` itself must wait for the
  // copies of other threads.
  template <class Copy>
  __device__ __forceinline__ void produce(Copy&& copy_chunk) {
    produce(copy_chunk, [](int) {});
  }
  template <class Copy, class Prepare>
  __device__ __forceinline__ void produce(Copy&& copy_chunk, Prepare&& prepare) {
    const int chunks = segment.chunks;
    const auto copy = [&](int i) {
      if (i < chunks) {
        const int stage = i % kStages;
        if (i >= kStages) wait(&empty[stage], parity(i - kStages));
        copy_chunk(i, stages[stage], &full[stage]);
      }
      commit_copies();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) copy(i);
    for (int i = 0; i < chunks; ++i) {
      wait_for_copies<kStages - 2>();
      prepare(i);
      fence_for_products();
      arrive(&full[i % kStages]);
      copy(i + kStages - 1);  // waits for the consumers of the previous chunk
    }
  }
};

}  // namespace gla_ext::cuda::sm90
