// The consumer of forward/fused and forward/small.cu.
#pragma once

#include "cuda/sm90/tiles/channels.cuh"
#include "multiply.cuh"
#include "output.cuh"
#include "passage.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::forward {

// before: number of chunks in the block's earlier segments.
template <int K, int kConsumers, int kItems, class Gate>
__device__ __forceinline__ void consume(Unit<K, kConsumers, kItems, Gate>& s, const Problem& p,
                                        const Segment& segment, int before, int group,
                                        int block_v) {
  const int first_v = block_v + kTile * group;
  if (segment.tail) return write_tail(p, segment, first_v);
  const bool writes_tiers = first_v == 0 && threadIdx.x % kGroupThreads == 0;
  // With several segments the thread index is read again, so that values derived from it take no
  // registers in between.
  const auto thread = [] { return kItems > 1 ? thread_index() : static_cast<int>(threadIdx.x); };
  State<K> state;
  state.load(p, segment, first_v, thread());
  Passage<K> passage(s.pass[group]);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int number = before + chunk, stage = number % s.kStages;
    auto& tiles = s.stages[stage];
    wait(&s.full[stage], static_cast<uint32_t>(number / s.kStages) & 1);
    const bool strong = __any_sync(0xffffffffu, s.strong[stage][0]);
    passage.enter(group, s.enter[stage], s.leave[stage]);
    if (s.kAhead && chunk < segment.replayed) {
      state.pass(s.pass[group]);
      if (strong) state.scale(s.middle[stage]);
      const ValueOperand<false> v(tiles.v[group]);
      begin_products();
      multiply_keys(state, v, tiles.k);
      commit_products();
      group_barrier<kConsumerBarrier>(group);  // the factors are read
      wait_for_products<0>();
      arrive(&s.empty[stage]);
      continue;
    }
    float o[32];  // [64 values][64 tokens]
    multiply_chunk<false>(
        o, state,
        {tiles.q, tiles.k, tiles.g[0], tiles.v[group], s.pass[group], s.middle[stage], strong});
    wait_for_products<0>();
    keep_state(p, segment, chunk, state, first_v, s.leave[stage]);
    if (chunk + 1 == segment.chunks) state.scale(s.leave[stage]);
    store_output(tiles.v[group], o, group, p, segment, chunk, first_v);
    if (writes_tiers) {
      const int rows = strong && p.past_alone ? strong_rows(s.strong[stage]) : kTile;
      write_tier(p, segment, chunk, strong ? rows : 0);
    }
    arrive(&s.empty[stage]);
  }
  state.store(p, segment, first_v, thread());
}

}  // namespace gla_ext::cuda::sm90::forward
