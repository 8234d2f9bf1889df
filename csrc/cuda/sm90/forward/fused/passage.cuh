// How the state passes from one chunk to the next in the forward sweeps that gate.
#pragma once

#include "output.cuh"
#include "state.cuh"

namespace gla_ext::cuda::sm90::forward {

// Of a consumer. Its state is multiplied once where chunks meet: by the factor by which it leaves
// one chunk times that by which it enters the next.
template <int K>
class Passage {
 public:
  // factors: shared memory, for factors in the order of `State::quad_index`.
  __device__ __forceinline__ explicit Passage(float (&factors)[K]) : factors_(factors) {}

  // Enters a chunk with these factors, which may be overwritten as soon as the consumer has left
  // it. `factors` are no longer read: a barrier of the consumer (in place_output, or in a replayed
  // chunk) came after the last read. Ends with a barrier of the consumer, after which the new ones
  // are there.
  __device__ __forceinline__ void enter(int group, const float* enter, const float* leave) {
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    if (K == kGroupThreads || thread < K) {
      factors_[State<K>::quad_index(thread)] = enter[thread] * leave_;
      leave_ = leave[thread];
    }
    group_barrier<kConsumerBarrier>(group);
  }

 private:
  float (&factors_)[K];
  float leave_ = 1.f;  // of this thread's channel in the chunk before
};

}  // namespace gla_ext::cuda::sm90::forward
