// The consumer of states/fused. Two other kernels have a similar loop, of which only the product is
// the same: states/prepared.cu takes the factors from memory, stores scaled tiles by bulk stores
// and serves both sweeps; states/cluster.cu reads chunks gated by two blocks and has no shared
// memory left for the state.
#pragma once

#include "cuda/device/gates.cuh"
#include "shared.cuh"
#include "state.cuh"

namespace gla_ext::cuda::sm90::states::fused {

template <Sweep kSweep, Store kStore, int kConsumers, class Gate>
__device__ __forceinline__ void consume(Unit<kConsumers, Gate>& s, const Problem& p, int member,
                                        int block_v) {
  using F = Fields<kSweep>;
  const Segment& segment = s.segment;
  const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
  const int64_t boundary = (segment.n * p.H + segment.head) * matrix;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  Tile* tile = s.state + member;
  State<kTile> state(member, 0, block_v);
  state.clear();
  if constexpr (kStore == Store::kChunks) load_entering<kSweep>(state, p, segment);
  for (int i = 0; i < segment.chunks; ++i) {
    const int stage = i % s.kStages;
    const int64_t chunk_head = segment.chunk_head(p, F::chunk(segment, i));
    if constexpr (kStore == Store::kChunks)
      state.store_chunk(F::chunk_states(p) + chunk_head * matrix, tile, p, member);
    wait(&s.full[stage], static_cast<uint32_t>(i / s.kStages) & 1);
    const int row = thread / 32 * 16 + thread % 32 / 4;
    const float decays[2] = {exp2_ftz(s.b_last[stage][row]), exp2_ftz(s.b_last[stage][row + 8])};
#pragma unroll
    for (int e = 0; e < state.kValues / 2; ++e) state.x[e] *= decays[e / 2 % 2];
    const auto& tiles = s.stages[stage];
    const Operand y = tiles.y, x = Operand(tiles.x[0]).from_tile(member);
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      product<Contiguous::kOther, Contiguous::kOther>(state.x, sixteen_rows(y, step),
                                                      sixteen_rows(x, step));
    commit_products();
    if (kSweep == Sweep::kStates && kStore == Store::kChunks && block_v == 0 && member == 0 &&
        thread == 0)
      p.tiers[chunk_head * kMaxTierBlocks] = s.strong[stage] != 0 ? kTile : 0;
    wait_for_products<0>();
    arrive(&s.empty[stage]);
  }
  if constexpr (kStore == Store::kSegment)
    state.store(p, F::segment_states(p) + segment.state * matrix, false);
  else if (F::ends(segment) && F::final(p) != nullptr)
    state.store(p, F::final(p) + boundary, p.state_v_first);
}

}  // namespace gla_ext::cuda::sm90::states::fused
