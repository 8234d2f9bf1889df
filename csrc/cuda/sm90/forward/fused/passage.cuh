// How the state passes from one chunk to the next in the forward sweeps that gate.
#pragma once

#include "output.cuh"
#include "state.cuh"

namespace gla_ext::cuda::sm90::forward {

// A consumer's, whose state is multiplied once where chunks meet: by the factor by which it leaves
// one times that by which it enters the next.
template <int K>
class Passage {
 public:
  // factors: a place in shared memory. There they lie in the order of `State::quad_index`.
  __device__ __forceinline__ explicit Passage(float (&factors)[K]) : factors_(factors) {}

  // Into a chunk with these factors, which may be overwritten as soon as the consumer has left it.
  // A barrier of the consumer's (in place_output, or in a chunk before the segment's own) stands
  // behind the last reads of the place. Ends with a barrier of the consumer, behind which the new
  // ones are there.
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
  float leave_ = 1.f;  // of this thread's channel, the chunk before
};

}  // namespace gla_ext::cuda::sm90::forward
