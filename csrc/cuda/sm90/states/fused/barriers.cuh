// Named barriers of the states' sweeps. Each of several warpgroups has the next number; 0 is
// __syncthreads.
#pragma once

namespace gla_ext::cuda::sm90::states {

enum NamedBarrier {
  kProducersBarrier = 1,        // states/fused: of both producers
  kProducerBarrier = 2,         // states/fused: of a producer, two of them
  kClusterProducerBarrier = 1,  // states/cluster.cu: the same
  kConsumerBarrier = 4,         // of a consumer, two or three of them
};

}  // namespace gla_ext::cuda::sm90::states
