// Named barriers of the forward sweeps that gate. If several warpgroups have a barrier each, these
// are numbered consecutively. Number 0 is __syncthreads.
#pragma once

namespace gla_ext::cuda::sm90::forward {

enum NamedBarrier {
  kProducerBarrier = 1,   // one producer (two of these)
  kConsumerBarrier = 3,   // one consumer (two of these)
  kProducersBarrier = 5,  // both producers
};

}  // namespace gla_ext::cuda::sm90::forward
