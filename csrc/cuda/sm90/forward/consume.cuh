// What a consumer of forward.cu does.
#pragma once

#include "multiply.cuh"
#include "output.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

template <int K, int kMembers>
__device__ __forceinline__ void consume(Unit<K, kMembers>& s, const Problem& p, int group,
                                        int block_v) {
  const Segment& segment = s.segment;
  const int member = group % kMembers, first_v = block_v + kTile * member;
  if (segment.tail) return write_tail(p, segment, first_v);
  const bool writes_tiers = first_v == 0 && threadIdx.x % kGroupThreads == 0;
  State<K> state;
  state.load(p, segment, first_v);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int stage = chunk % kStages;
    auto& tiles = s.stages[stage];
    if (chunk > 0) state.scale(s.leave[(chunk - 1) % (kStages + 1)]);
    wait(&s.full[stage], static_cast<uint32_t>(chunk / kStages) & 1);
    const bool exact = __any_sync(0xffffffffu, s.exact[stage]);
    float o[32];  // [64 values][64 tokens]
    multiply_chunk(o, state,
                   {tiles.q, tiles.k, tiles.g, tiles.v + member * kTileBytes, s.enter[stage],
                    s.middle[stage], exact});
    store_output(tiles.v + member * kTileBytes, o, group, p, segment, chunk, first_v);
    arrive(&s.empty[stage]);
    if (writes_tiers)
      *reinterpret_cast<uint64_t*>(p.tiers + segment.chunk_head(p, chunk) * kMaxTierBlocks) = exact;
  }
  if (segment.chunks > 0) state.scale(s.leave[(segment.chunks - 1) % (kStages + 1)]);
  state.store(p, segment, first_v);
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
