// Launches of the kernels that run in clusters.
#pragma once

#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/segments/items.cuh"
#include "dependent_launch.cuh"

namespace gla_ext::cuda::sm90 {

template <auto kKernel, class SharedOfKernel>
void launch_items(const Problem& p, int64_t items, int64_t clusters, cudaStream_t stream) {
  static_assert(fits_multiprocessor(1, sizeof(SharedOfKernel)));
  static const DynamicShared shared(kKernel, sizeof(SharedOfKernel));
  shared.allow();
  launch_dependent<kClusterBlocks>(kKernel, kClusterBlocks * clusters, kBlockThreads,
                                   sizeof(SharedOfKernel), stream, p, items);
}

// Launches kOne where a cluster takes one work item, kMany where the plan gives it several (up to
// kMostItems).
template <template <int> class SharedOf, auto kOne, auto kMany>
void launch_clusters(const Problem& p, cudaStream_t stream) {
  const int64_t items = count_items(p);
  if (items == 0) return;
  if (p.items_each == 1)
    launch_items<kOne, SharedOf<1>>(p, items, items, stream);
  else
    launch_items<kMany, SharedOf<kMostItems>>(p, items, blocks_of(items, p.items_each), stream);
}

}  // namespace gla_ext::cuda::sm90
