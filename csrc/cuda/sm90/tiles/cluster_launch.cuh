// How the kernels of paired blocks are launched.
#pragma once

#include "../../device/launch.cuh"
#include "../dependent_launch.cuh"
#include "../dynamic_shared.h"
#include "pieces.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

template <auto kKernel, class SharedOfKernel>
void launch_pieces(const Problem& p, int64_t pieces, int64_t clusters, cudaStream_t stream) {
  static_assert(sizeof(SharedOfKernel) <= 227 << 10);
  static const DynamicShared shared(kKernel, sizeof(SharedOfKernel));
  shared.allow();
  launch_dependent<kPair>(kKernel, kPair * clusters, kBlockThreads, sizeof(SharedOfKernel), stream,
                          p, pieces);
}

// kOne takes a piece a cluster, kMany up to kMostPieces, as many as the plan says.
template <template <int> class SharedOf, auto kOne, auto kMany>
void launch_paired(const Problem& p, cudaStream_t stream) {
  const int64_t pieces = count_pieces(p);
  if (pieces == 0) return;
  if (p.items_each == 1)
    launch_pieces<kOne, SharedOf<1>>(p, pieces, pieces, stream);
  else
    launch_pieces<kMany, SharedOf<kMostPieces>>(p, pieces, blocks_of(pieces, p.items_each), stream);
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
