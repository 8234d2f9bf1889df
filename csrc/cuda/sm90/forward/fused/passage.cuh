// The factors of the state between two chunks, in the forward sweeps that gate.
#pragma once

#include "output.cuh"
#include "state.cuh"

namespace gla_ext::cuda::sm90::forward {

// Used by a consumer. It multiplies its state once between two chunks: by the factor for leaving
// one chunk times the factor for entering the next.
template <int K>
class Passage {
 public:
  // factors: shared memory for factors in the order of `State::quad_index`.
  __device__ __forceinline__ explicit Passage(float (&factors)[K]) : factors_(factors) {}

  // Sets the factors for entering a chunk. `enter` and `leave` may be overwritten as soon as the
  // consumer has released the chunk. The old `factors` are no longer read, because a barrier of the
  // consumer (in place_output, or in a replayed chunk) followed the last read. This function ends
  // with a barrier of the consumer, after which the new factors can be read.
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
  float leave_ = 1.f;  // of this thread's channel in the previous chunk
};

}  // namespace gla_ext::cuda::sm90::forward
