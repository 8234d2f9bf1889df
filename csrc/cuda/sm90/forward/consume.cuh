// What a consumer of forward.cu does.
#pragma once

#include "output.cuh"
#include "shared.cuh"
#include "state.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

template <int K, int kMembers>
__device__ __forceinline__ void consume(Unit<K, kMembers>& s, const Problem& p, int group,
                                        int block_v) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  const Segment& segment = s.segment;
  const int member = group % kMembers, first_v = block_v + kTile * member;
  if (segment.tail) return write_tail(p, segment, first_v);
  const bool writes_tiers = first_v == 0 && threadIdx.x % kGroupThreads == 0;
  State<K> state;
  state.load(p, segment, first_v);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int stage = chunk % kStages;
    auto& tiles = s.stages[stage];
    const uint32_t q = shared_address(tiles.q), k = shared_address(tiles.k);
    const uint32_t v = shared_address(tiles.v) + member * kTileBytes;
    if (chunk > 0) state.scale(s.leave[(chunk - 1) % (kStages + 1)]);
    wait(&s.full[stage], static_cast<uint32_t>(chunk / kStages) & 1);
    const bool exact = __any_sync(0xffffffffu, s.exact[stage]);

    state.scale(s.enter[stage]);
    uint32_t S_operand[K / 16][4];
#pragma unroll
    for (int i = 0; i < K / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S_operand[i][e] = pack(state.x[8 * i + 2 * e], state.x[8 * i + 2 * e + 1]);
    if (exact) state.scale(s.middle[stage]);
    float o[32];  // [64 values][64 tokens]
    begin_products();
#pragma unroll
    for (int i = 0; i < K / 16; ++i)
      product(o, S_operand[i], descriptor(q + i / 4 * kTileBytes + i % 4 * kStepBytes, 0), i > 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<kOther, kSummed>(o, descriptor(v + 2048 * i, kTileBytes),
                               descriptor(shared_address(tiles.g) + kStepBytes * i, 0));
    commit_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<kOther, kOther>(state.x, descriptor(v + 2048 * i, kTileBytes),
                              descriptor(k + 2048 * i, kTileBytes));
    commit_products();
    wait_for_products<0>();
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
