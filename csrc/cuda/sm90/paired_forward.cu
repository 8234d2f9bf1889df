// forward.cu where a head has more than 128 values: two blocks of a cluster, each with 128 of them,
// gate the segment's chunks in turn, and hand each other q^, k^, A and the state's factors.
//
// grid    (segment, head, 128 values), two of these a cluster; two producer and two consumer
//         warpgroups a block
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0 or segment_states
// writes  o [B, T, H, V], ht, tiers [B, slots, H, blocks]
//
// Block r of a pair gates chunks r, r + 2, ..., its producers these in turn, each in a place of its
// own, from where its consumers multiply them and a bulk copy takes them to the other block. The
// place is used again when the consumers of both blocks have left the chunk. A consumer copies its
// own v. The arithmetic, and so every bit, is forward.cu's.
#include "../device/launch.cuh"
#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "dynamic_shared.h"
#include "forward/gating.cuh"
#include "forward/multiply.cuh"
#include "forward/output.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kPair = 2;  // blocks of a cluster
constexpr int kKeys = kOperandKeys, kKeyTiles = kKeys / kTile;
constexpr int kValues = kGroups * kTile;  // of a block
constexpr int kProducerBarrier = 1;       // of a producer, two of them
constexpr int kWarps = kGroupThreads / 32;

// Of the state's key channels at a chunk, as in forward.cu; whether the chunk is outside tier 1.
struct alignas(16) Factors {
  float enter[kKeys], middle[kKeys], leave[kKeys];
  int exact;
};

// A chunk as it is multiplied.
struct Tiles {
  unsigned char q[kKeyTiles * kTileBytes];  // [token][K], then q^
  unsigned char k[kKeyTiles * kTileBytes];  // [token][K], then k^
  unsigned char A[kTileBytes];              // the first tile of g [token][K], then A [token][token]
};
// And where it is gated.
struct Gated {
  Tiles tiles;
  unsigned char other_g[(kKeyTiles - 1) * kTileBytes];  // the other tiles of g
};
static_assert(offsetof(Gated, other_g) == offsetof(Tiles, A) + kTileBytes);

struct alignas(1024) Shared {
  Gated own[kGroups];                           // by this block's producers
  Tiles received[kGroups];                      // from the other's
  unsigned char v[kPair][kGroups][kTileBytes];  // [token][64 values], then o
  unsigned char triangle[kTileBytes];           // of ones, [token][token]
  Factors own_factors[kGroups], received_factors[kGroups];
  float b_last[kGroups][kKeys];
  float2 references[kGroups][kKeys];
  // full: a chunk is there. empty: the consumers of both blocks have left one of this block's own.
  uint64_t own_full[kGroups], received_full[kGroups], empty[kGroups];
  Segment segment;
};
static_assert(sizeof(Shared) <= 227 << 10);

// Chunk `number` of those that block `rank` gates.
__device__ __forceinline__ int chunk_of(int number, int rank) { return kPair * number + rank; }
// Of the barriers of a producer's chunks.
__device__ __forceinline__ uint32_t parity_of(int number) {
  return static_cast<uint32_t>(number / kGroups) & 1;
}

__device__ __forceinline__ void produce(Shared& s, const Problem& p, int group, int rank) {
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, other = 1 - rank;
  const auto barrier = [group] { group_barrier<kProducerBarrier>(group); };
  const Gating<kKeys, decltype(barrier)> gate{s.triangle, thread, barrier};
  Tiles& own = s.own[group].tiles;
  Factors& factors = s.own_factors[group];
  const auto copy = [&](int number) {
    const int chunk = chunk_of(number, rank);
    if (chunk >= segment.chunks) return;
    copy_rows<kKeyTiles, kGroupThreads>(own.A, p.g, segment, chunk, thread, 0, p.K);
    copy_rows<kKeyTiles, kGroupThreads>(own.q, p.q, segment, chunk, thread, 0, p.K);
    copy_rows<kKeyTiles, kGroupThreads>(own.k, p.k, segment, chunk, thread, 0, p.K);
    commit_copies();
  };
  copy(group);
  for (int number = group; chunk_of(number, rank) < segment.chunks; number += kGroups) {
    wait_for_copies<0>();
    gate({own.q, own.k, own.A, factors.enter, factors.middle, factors.leave, &factors.exact,
          s.b_last[group], s.references[group]},
         p.scale);
    fence_for_products();  // and bulk copies
    barrier();             // A is written
    if (thread == 0) {
      arrive(&s.own_full[group]);
      const uint32_t full = address_in(&s.received_full[group], other);
      arrive_and_expect(full, sizeof(Tiles) + sizeof(Factors));
      bulk_send(address_in(&s.received_factors[group], other), &factors, sizeof(Factors), full);
      bulk_send(address_in(&s.received[group], other), &own, sizeof(Tiles), full);
    }
    wait(&s.empty[group], parity_of(number));
    copy(number + kGroups);
  }
}

__device__ __forceinline__ void consume(Shared& s, const Problem& p, int group, int first_v,
                                        int rank) {
  const Segment& segment = s.segment;
  if (segment.tail) return write_tail(p, segment, first_v);
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const bool writes_tiers = first_v == 0 && thread == 0;
  // Into the place of rows of o that this thread has read itself.
  const auto copy = [&](int chunk) {
    if (chunk < segment.chunks)
      copy_rows<1, kGroupThreads>(s.v[chunk % kPair][group], p.v, segment, chunk, thread, first_v,
                                  p.V);
    commit_copies();
  };
  State<kKeys> state;
  state.load(p, segment, first_v);
  copy(0);
  copy(1);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int number = chunk / kPair, gated_by = chunk % kPair, producer = number % kGroups;
    const bool is_own = gated_by == rank;
    const Tiles& tiles = is_own ? s.own[producer].tiles : s.received[producer];
    const Factors& factors = is_own ? s.own_factors[producer] : s.received_factors[producer];
    unsigned char* v = s.v[chunk % kPair][group];
    wait_for_copies<1>();
    fence_for_products();
    group_barrier<kConsumerBarrier>(group);  // v is there
    wait(is_own ? &s.own_full[producer] : &s.received_full[producer], parity_of(number));
    const bool exact = __any_sync(0xffffffffu, factors.exact);
    float o[32];  // [64 values][64 tokens]
    multiply_chunk(o, state, {tiles.q, tiles.k, tiles.A, v, factors.enter, factors.middle, exact});
    state.scale(factors.leave);
    fence_for_products();  // the factors are read before the other block's bulk copy writes others
    __syncwarp();
    if (thread % 32 == 0) arrive_in_cluster(address_in(&s.empty[producer], gated_by));
    store_output(v, o, group, p, segment, chunk, first_v);
    copy(chunk + kPair);
    if (writes_tiers)
      *reinterpret_cast<uint64_t*>(p.tiers + segment.chunk_head(p, chunk) * kMaxTierBlocks) = exact;
  }
  state.store(p, segment, first_v);
}

__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kBlockThreads, 1)
    paired_forward_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(s_bytes);
  const int v_blocks = blocks_of(p.V, kValues);
  if (threadIdx.x == 0) {
    s.segment = find_segment(p, blockIdx.x / v_blocks);
    for (int i = 0; i < kGroups; ++i) {
      init_barrier(&s.own_full[i], 1);
      init_barrier(&s.received_full[i], 1);
      init_barrier(&s.empty[i], kPair * kGroups * kWarps);
    }
    fence_barriers();
  }
  fill_triangle<kBlockThreads>(s.triangle);
  fence_for_products();
  sync_cluster();  // the barriers, the segment and the triangle are there
  const int group = warpgroup(), rank = static_cast<int>(blockIdx.x % kPair);
  if (group < kGroups) {
    give_registers<96>();
    if (!s.segment.tail) produce(s, p, group, rank);
  } else {
    take_registers<160>();
    const int consumer = group - kGroups, block_v = static_cast<int>(blockIdx.x % v_blocks);
    consume(s, p, consumer, block_v * kValues + consumer * kTile, rank);
  }
  sync_cluster();  // the other block writes nothing here any more
#endif
}

}  // namespace

bool pairs_blocks(const Problem& p) { return p.K > kTile && blocks_of(p.V, kValues) % kPair == 0; }

void paired_forward(const Problem& p, cudaStream_t stream) {
  static const DynamicShared shared(paired_forward_kernel, sizeof(Shared));
  const int64_t blocks = segment_heads(p.grid, p.H) * blocks_of(p.V, kValues);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(paired_forward_kernel, blocks, kBlockThreads, sizeof(Shared), stream, p);
}

}  // namespace gla_ext::cuda::sm90
