// Named barriers of the forward sweeps that gate. Each of several warpgroups has the next number; 0
// is __syncthreads.
#pragma once

namespace gla_ext::cuda::sm90::forward {

enum NamedBarrier {
  kProducerBarrier = 1,   // of a producer, two of them
  kConsumerBarrier = 3,   // of a consumer, two of them
  kProducersBarrier = 5,  // of both producers
};

}  // namespace gla_ext::cuda::sm90::forward
