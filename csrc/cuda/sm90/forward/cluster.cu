// forward/fused for heads of more than 128 values. Each of a cluster's two blocks has 128 values;
// the blocks gate the segment's chunks in turn and send each other q^, k^, A and the state's
// factors.
//
// grid    (segment, head, 256 values) by a cluster, which takes up to four of them in sequence; a
//         block has two producer and two consumer warpgroups
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0 or segment_states
// writes  o [B, T, H, V], ht, tiers [B, entries, H, blocks]; for backward prepared chunks [B,
// entries,
//         H], without A of strong ones
//
// Block r of a cluster gates chunks r, r + 2, ... Its producers take these in turn; each producer
// has a stage of its own. The block's consumers multiply a chunk in that stage, and a bulk copy
// sends it to the other block. The stage is used again once the consumers of both blocks have
// released the chunk. A consumer copies its own v. Producers may work on the next segment while
// consumers finish the last chunks of this one. The arithmetic, and so every bit, is that of
// forward/fused.
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/cluster_launch.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "cuda/sm90/tiles/gating.cuh"
#include "fused/for_backward.cuh"
#include "fused/multiply.cuh"
#include "fused/output.cuh"
#include "fused/passage.cuh"

namespace gla_ext::cuda::sm90 {
namespace forward::cluster {

constexpr int kKeys = kGroupKeys;

// Factors of the state's key channels at a chunk, as in forward/fused, and whether the chunk is
// strong.
struct alignas(16) Factors {
  float enter[kKeys], middle[kKeys], leave[kKeys];
  int strong[kStrong<1>];
};

// A chunk as it is multiplied.
struct Tiles {
  Tile q[kKeyTiles];  // [token][K], replaced by q^
  Tile k[kKeyTiles];  // [token][K], replaced by k^
  Tile A;             // first tile of g [token][K], replaced by A [token][token]
};
// A chunk while it is gated.
struct Gated {
  Tiles tiles;
  Tile other_g[kKeyTiles - 1];  // the other tiles of g
};
static_assert(offsetof(Gated, other_g) == offsetof(Tiles, A) + kTileBytes);

// kItems: the largest number of work items of a cluster.
template <int kItems>
struct alignas(1024) Shared {
  Gated own[kGroups];               // gated by this block's producers
  Tiles received[kGroups];          // received from the other block's producers
  Tile v[kClusterBlocks][kGroups];  // [token][64 values], then o
  Tile triangle;                    // ones on and below the diagonal, [token][token]
  Factors own_factors[kGroups], received_factors[kGroups];
  float b_last[kGroups][kKeys];
  float2 references[kGroups][kKeys];
  alignas(16) float pass[kGroups][kKeys];  // of each consumer, see `Passage`
  Handover handover;
  uint64_t first_rows;  // the first producer's first rows have arrived
  Items<kItems> items;
};

// kForBackward: also stores prepared chunks. kPastAlone: see tiles/gating.cuh.
template <bool kForBackward, bool kPastAlone, int kItems>
__device__ __forceinline__ void produce(Shared<kItems>& s, const Problem& p, int group, int rank) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, other = 1 - rank;
  const auto barrier = [group] { group_barrier<kProducerBarrier>(group); };
  const Gating<kKeys, decltype(barrier), bf16, kPastAlone> gate{s.triangle, thread, barrier};
  Tiles& own = s.own[group].tiles;
  Factors& factors = s.own_factors[group];
  for (OwnChunk own_chunk(s.items, group, rank); own_chunk.is_there(); own_chunk.next()) {
    const Segment& segment = own_chunk.segment();
    const int chunk = own_chunk.chunk();
    s.handover.wait_for_place(own_chunk.number);
    // All blocks start at once. The second producer waits, so that its copies do not slow down
    // those of the first rows.
    if (own_chunk.number == 1) wait(&s.first_rows, 0);
    if constexpr (kForBackward) {
      if (thread == 0) wait_for_bulk_stores();
      barrier();  // the previous chunk is read
    }
    copy_rows<kKeyTiles, kGroupThreads>(&own.A, p.g, segment, chunk, thread, 0, p.K);
    copy_rows<kKeyTiles, kGroupThreads>(own.q, p.q, segment, chunk, thread, 0, p.K);
    copy_rows<kKeyTiles, kGroupThreads>(own.k, p.k, segment, chunk, thread, 0, p.K);
    commit_copies();
    wait_for_copies<0>();
    if (own_chunk.number == 0) arrive(&s.first_rows);
    const GatedChunk gated{own.q,          own.k,           &own.A,
                           factors.enter,  factors.middle,  factors.leave,
                           factors.strong, s.b_last[group], s.references[group]};
    const int strong_rows = gate(gated, p.scale);
    if (kPastAlone && thread == 0) write_tier(p, segment, chunk, strong_rows);
    fence_for_products();  // also for bulk copies
    arrive(&s.handover.own_full[group]);
    barrier();  // A is written
    if (thread == 0) {
      const uint32_t full =
          s.handover.expect_in_other(group, other, sizeof(Tiles) + sizeof(Factors));
      bulk_send(address_in(&s.received_factors[group], other), &factors, sizeof(Factors), full);
      bulk_send(address_in(&s.received[group], other), &own, sizeof(Tiles), full);
      if constexpr (kForBackward)
        store_operands(prepared_at(p, segment.chunk_head(p, chunk)), gated);
    }
  }
  if (kForBackward && thread == 0) wait_for_bulk_stores();  // the block must not end earlier
}

// Works on one item. before: how many chunks each block has gated in earlier items.
template <bool kForBackward, int kItems>
__device__ __forceinline__ void consume(Shared<kItems>& s, const Problem& p, const Segment& segment,
                                        const int (&before)[kClusterBlocks], int group, int first_v,
                                        int rank) {
  if (segment.tail) return write_tail(p, segment, first_v);
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const bool writes_tiers = first_v == 0 && thread == 0 && !p.past_alone;  // else producers do
  // Copies rows of v to the place of those rows of o that this thread itself has stored to memory.
  const auto copy = [&](int chunk) {
    if (chunk < segment.chunks)
      copy_rows<1, kGroupThreads>(&s.v[chunk % kClusterBlocks][group], p.v, segment, chunk, thread,
                                  first_v, p.V);
    commit_copies();
  };
  copy(0);
  copy(1);
  State<kKeys> state;
  state.load(p, segment, first_v);
  wait_for_copies<1>();
  fence_for_products();
  Passage<kKeys> passage(s.pass[group]);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const Turn turn(chunk, before);
    const bool is_own = turn.rank == rank;
    const Tiles& tiles = is_own ? s.own[turn.producer].tiles : s.received[turn.producer];
    const Factors& factors =
        is_own ? s.own_factors[turn.producer] : s.received_factors[turn.producer];
    Tile& v = s.v[chunk % kClusterBlocks][group];
    s.handover.wait_for_chunk(turn, rank);
    const bool strong = __any_sync(0xffffffffu, factors.strong[0]);
    passage.enter(group, factors.enter, factors.leave);  // after its barrier v has arrived

    float o[32];  // [64 values][64 tokens]
    multiply_chunk<kForBackward>(
        o, state, {tiles.q, tiles.k, tiles.A, v, s.pass[group], factors.middle, strong});
    const auto leave = [&] {
      wait_for_products<0>();
      if constexpr (!kForBackward) keep_state(p, segment, chunk, state, first_v, factors.leave);
      if (chunk + 1 == segment.chunks) state.scale(factors.leave);
      // v of this thread's next chunk has arrived; later barriers tell the other threads. The fence
      // also orders the reads of the factors before the other block's bulk copy overwrites them. A
      // fence after the rows of o would wait until these are in memory.
      wait_for_copies<0>();
      fence_for_products();
      s.handover.leave(turn, rank);
    };
    // For backward, o is stored while the state's products run, which makes forward and backward
    // faster by 2 %. Without the stores of prepared chunks this order would make forward slower by
    // 1 %.
    if constexpr (kForBackward) {
      wait_for_products<1>();
      const OutputRows rows(v, o, group);
      leave();
      rows.write(p, segment, chunk, first_v);
    } else {
      leave();
      store_output(v, o, group, p, segment, chunk, first_v);
    }
    copy(chunk + kClusterBlocks);
    if (writes_tiers) write_tier(p, segment, chunk, strong ? kTile : 0);
  }
  state.store(p, segment, first_v);
}

template <int kItems, bool kForBackward, bool kPastAlone>
__global__ void __launch_bounds__(kBlockThreads, 1) kernel(Problem p, int64_t items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared<kItems>*>(s_bytes);
  const Cluster cluster;
  s.items.find(p, items, cluster);
  if (threadIdx.x == 0) {
    s.handover.init();
    init_barrier(&s.first_rows, kGroupThreads);
    fence_barriers();
  }
  fill_triangle<kBlockThreads>(s.triangle);
  fence_for_products();
  sync_cluster();  // the barriers, the segments and the triangle are written
  const int group = warpgroup();
  if (group < kGroups) {
    give_registers<96>();
    produce<kForBackward, kPastAlone>(s, p, group, cluster.rank);
  } else {
    take_registers<160>();
    const int consumer = group - kGroups;
    s.items.for_items(
        p, cluster, [&](const Segment& segment, int block_v, const int (&before)[kClusterBlocks]) {
          consume<kForBackward>(s, p, segment, before, consumer, block_v + consumer * kTile,
                                cluster.rank);
        });
  }
  sync_cluster();  // from here on the other block writes nothing to this one
#endif
}

template <bool kForBackward, bool kPastAlone>
void launch(const Problem& p, cudaStream_t stream) {
  launch_clusters<Shared, kernel<1, kForBackward, kPastAlone>,
                  kernel<kMostItems, kForBackward, kPastAlone>>(p, stream);
}

}  // namespace forward::cluster

void launch_forward_cluster(const Problem& p, cudaStream_t stream) {
  if (p.past_alone)
    forward::cluster::launch<false, true>(p, stream);
  else
    forward::cluster::launch<false, false>(p, stream);
}

void launch_forward_cluster_for_backward(const Problem& p, cudaStream_t stream) {
  forward::cluster::launch<true, false>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
