// The state of a consumer's values in groups of 128 key channels, like the operands in memory. The
// last group has 64 channels if the number of tiles of 64 is odd.
#pragma once

#include <type_traits>

#include "fused/state.cuh"

namespace gla_ext::cuda::sm90::forward {

template <int kTiles>
struct Parts {
  static constexpr int kTilesOfGroup = kGroupKeys / kTile, kWhole = kTiles / kTilesOfGroup;
  struct Nothing {};
  State<kGroupKeys> whole[kWhole];
  std::conditional_t<kTiles % kTilesOfGroup == 1, State<kTile>, Nothing> half;

  // Calls f(group, its number) for each group.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) {
#pragma unroll
    for (int i = 0; i < kWhole; ++i) f(whole[i], i);
    if constexpr (kTiles % kTilesOfGroup == 1) f(half, kWhole);
  }
};
template <>
struct Parts<1> {
  State<kTile> half;

  template <class F>
  __device__ __forceinline__ void for_each(F&& f) {
    f(half, 0);
  }
};

}  // namespace gla_ext::cuda::sm90::forward
