// The producer of forward/fused.
#pragma once

#include "for_backward.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::forward {

// Issues the copies of a chunk's rows while another chunk is gated. The consumers have released
// their stage long before.
template <class Copy>
struct AskBetween : NothingBetween {
  const Copy& copy;
  int chunk;
  __device__ __forceinline__ void await_rows() const { copy(chunk); }
};

// kForBackward: also stores prepared chunks. A stage is then empty only when the stores have read
// it too, since its next chunk belongs to the other producer.
template <bool kForBackward, bool kPastAlone, int K, class Gate>
__device__ __forceinline__ void produce(Unit<K, kGroups, 1, Gate>& s, const Tile& triangle,
                                        const Problem& p, int group, int block_v) {
  const Segment& segment = s.segments[0];
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const auto barrier = [group] { group_barrier<kProducerBarrier>(group); };
  const Gating<K, decltype(barrier), Gate, kPastAlone> gate{triangle, thread, barrier};
  const auto copy = [&](int chunk) {
    if (chunk < segment.chunks) {
      const int stage = chunk % s.kStages;
      if (chunk >= s.kStages)
        wait(&s.empty[stage], static_cast<uint32_t>(chunk / s.kStages - 1) & 1);
      auto& tiles = s.stages[stage];
      copy_rows<K / 64, kGroupThreads, Gate>(tiles.g, p.g, segment, chunk, thread, 0, p.K);
      if (!s.kAhead || chunk >= segment.replayed)
        copy_rows<K / 64, kGroupThreads>(tiles.q, p.q, segment, chunk, thread, 0, p.K);
      copy_rows<K / 64, kGroupThreads>(tiles.k, p.k, segment, chunk, thread, 0, p.K);
      copy_rows<kGroups, kGroupThreads>(tiles.v, p.v, segment, chunk, thread, block_v, p.V);
    }
    commit_copies();
  };
  constexpr bool kAhead = Unit<K, kGroups, 1, Gate>::kAhead;
  static_assert(!(kForBackward && kAhead), "a stage's next chunk would be the same producer's");
  copy(group);
  for (int chunk = group; chunk < segment.chunks; chunk += kGroups) {
    const int stage = chunk % s.kStages;
    auto& tiles = s.stages[stage];
    wait_for_copies<0>();
    const GatedChunk gated{tiles.q,         tiles.k,         tiles.g,
                           s.enter[stage],  s.middle[stage], s.leave[stage],
                           s.strong[stage], s.b_last[group], s.references[group]};
    if constexpr (kAhead) {
      const AskBetween<decltype(copy)> between{{}, copy, chunk + kGroups};
      if (chunk < segment.replayed)
        gate.gate_keys(gated, between);
      else
        gate(gated, p.scale, between);
    } else {
      gate(gated, p.scale);
    }
    fence_for_products();  // also for bulk stores
    arrive(&s.full[stage]);
    if constexpr (kForBackward) {
      barrier();  // A is written
      if (thread == 0) store_operands(prepared_at(p, segment.chunk_head(p, chunk)), gated);
    }
    if constexpr (!kAhead) copy(chunk + kGroups);  // waits for the consumers of the previous chunk
    if constexpr (kForBackward) {
      if (thread == 0) {
        wait_for_bulk_stores();
        arrive(&s.empty[stage]);
      }
    }
  }
}

}  // namespace gla_ext::cuda::sm90::forward
