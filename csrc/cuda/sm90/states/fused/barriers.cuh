// Named barriers of the states' sweeps. If several warpgroups have a barrier each, these are
// numbered consecutively. Number 0 is __syncthreads.
#pragma once

namespace gla_ext::cuda::sm90::states {

enum NamedBarrier {
  kProducersBarrier = 1,        // states/fused: both producers
  kProducerBarrier = 2,         // states/fused: one producer (two of these)
  kClusterProducerBarrier = 1,  // states/cluster.cu: one producer (two of these)
  kConsumerBarrier = 4,         // one consumer (two or three of these)
};

}  // namespace gla_ext::cuda::sm90::states
