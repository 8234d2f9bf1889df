// forward.cu where a head has more than 128 values: two blocks of a cluster, each with 128 of them,
// gate the segment's chunks in turn, and hand each other q^, k^, A and the state's factors.
//
// grid    (segment, head, 256 values), up to four of these one after the other, by a cluster; two
//         producer and two consumer warpgroups a block
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0
// writes  o [B, T, H, V], ht, tiers [B, slots, H, blocks]
//
// Block r of a pair gates chunks r, r + 2, ..., its producers these in turn, each in a place of its
// own, from where its consumers multiply them and a bulk copy takes them to the other block. The
// place is used again when the consumers of both blocks have left the chunk. A consumer copies its
// own v. Producers go on to the next segment while consumers are at this one's last chunks. The
// arithmetic, and so every bit, is forward.cu's.
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

// kPieces: the most segments, heads and 256 values that a cluster works on.
template <int kPieces>
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
  int taken;  // pieces, if there may be several
  Segment segments[kPieces];

  __device__ __forceinline__ int pieces() const { return kPieces == 1 ? 1 : taken; }
  // A block's own chunks are numbered through all of its pieces.
  __device__ __forceinline__ static int own_chunks(const Segment& segment, int rank) {
    return (segment.chunks + 1 - rank) / kPair;
  }
  // Of the barriers of a producer's chunks.
  __device__ __forceinline__ static uint32_t parity_of(int number) {
    return static_cast<uint32_t>(number / kGroups) & 1;
  }
};

template <int kPieces>
__device__ __forceinline__ void produce(Shared<kPieces>& s, const Problem& p, int group, int rank) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, other = 1 - rank;
  const auto barrier = [group] { group_barrier<kProducerBarrier>(group); };
  const Gating<kKeys, decltype(barrier)> gate{s.triangle, thread, barrier};
  Tiles& own = s.own[group].tiles;
  Factors& factors = s.own_factors[group];
  int number = group, before = 0;  // own chunks of the pieces before
  for (int piece = 0; piece < s.pieces(); ++piece) {
    const Segment& segment = s.segments[piece];
    if (segment.tail) return;  // of packed sequences, whose pieces are alone
    const int chunks = s.own_chunks(segment, rank);
    for (; number - before < chunks; number += kGroups) {
      const int chunk = kPair * (number - before) + rank;
      if (number >= kGroups) wait(&s.empty[group], s.parity_of(number - kGroups));
      copy_rows<kKeyTiles, kGroupThreads>(own.A, p.g, segment, chunk, thread, 0, p.K);
      copy_rows<kKeyTiles, kGroupThreads>(own.q, p.q, segment, chunk, thread, 0, p.K);
      copy_rows<kKeyTiles, kGroupThreads>(own.k, p.k, segment, chunk, thread, 0, p.K);
      commit_copies();
      wait_for_copies<0>();
      gate({own.q, own.k, own.A, factors.enter, factors.middle, factors.leave, &factors.exact,
            s.b_last[group], s.references[group]},
           p.scale);
      fence_for_products();  // and bulk copies
      arrive(&s.own_full[group]);
      barrier();  // A is written
      if (thread == 0) {
        const uint32_t full = address_in(&s.received_full[group], other);
        arrive_and_expect(full, sizeof(Tiles) + sizeof(Factors));
        bulk_send(address_in(&s.received_factors[group], other), &factors, sizeof(Factors), full);
        bulk_send(address_in(&s.received[group], other), &own, sizeof(Tiles), full);
      }
    }
    before += chunks;
  }
}

// Of one piece. before: chunks of either block in the pieces before.
template <int kPieces>
__device__ __forceinline__ void consume(Shared<kPieces>& s, const Problem& p,
                                        const Segment& segment, const int (&before)[kPair],
                                        int group, int first_v, int rank) {
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
  copy(0);
  copy(1);
  State<kKeys> state;
  state.load(p, segment, first_v);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int gated_by = chunk % kPair,
              number = (gated_by == 0 ? before[0] : before[1]) + chunk / kPair;
    const int producer = number % kGroups;
    const bool is_own = gated_by == rank;
    const Tiles& tiles = is_own ? s.own[producer].tiles : s.received[producer];
    const Factors& factors = is_own ? s.own_factors[producer] : s.received_factors[producer];
    unsigned char* v = s.v[chunk % kPair][group];
    wait_for_copies<1>();
    fence_for_products();
    group_barrier<kConsumerBarrier>(group);  // v is there
    wait(is_own ? &s.own_full[producer] : &s.received_full[producer], s.parity_of(number));
    const bool exact = __any_sync(0xffffffffu, factors.exact);
    float o[32];  // [64 values][64 tokens]
    multiply_chunk(o, state, {tiles.q, tiles.k, tiles.A, v, factors.enter, factors.middle, exact});
    state.scale(factors.leave);
    fence_for_products();  // the factors are read before the other block's bulk copy writes others
    if (is_own) {
      arrive(&s.empty[producer]);
    } else {
      __syncwarp();
      if (thread % 32 == 0) arrive_in_cluster(address_in(&s.empty[producer], gated_by));
    }
    store_output(v, o, group, p, segment, chunk, first_v);
    copy(chunk + kPair);
    if (writes_tiers)
      *reinterpret_cast<uint64_t*>(p.tiers + segment.chunk_head(p, chunk) * kMaxTierBlocks) = exact;
  }
  state.store(p, segment, first_v);
}

// Pairs of blocks of 128 values.
__host__ __device__ constexpr int value_pairs(const Problem& p) {
  return static_cast<int>(blocks_of(p.V, kPair * kValues));
}

template <int kPieces>
__global__ void __launch_bounds__(kBlockThreads, 1)
    paired_forward_kernel(Problem p, int64_t pieces) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared<kPieces>*>(s_bytes);
  const int64_t cluster = blockIdx.x / kPair, clusters = gridDim.x / kPair;
  const int v_pairs = value_pairs(p), rank = static_cast<int>(blockIdx.x % kPair);
  if (threadIdx.x < kPieces) {
    const int64_t piece = cluster + threadIdx.x * clusters;
    if (piece < pieces) s.segments[threadIdx.x] = find_segment(p, piece / v_pairs);
  }
  if (threadIdx.x == 0) {
    s.taken = static_cast<int>((pieces - cluster + clusters - 1) / clusters);
    for (int i = 0; i < kGroups; ++i) {
      init_barrier(&s.own_full[i], kGroupThreads);
      init_barrier(&s.received_full[i], 1);
      // All threads of this block's consumers, and the warps of the other's.
      init_barrier(&s.empty[i], kGroups * (kGroupThreads + kGroupThreads / 32));
    }
    fence_barriers();
  }
  fill_triangle<kBlockThreads>(s.triangle);
  fence_for_products();
  sync_cluster();  // the barriers, the segments and the triangle are there
  const int group = warpgroup();
  if (group < kGroups) {
    give_registers<96>();
    produce(s, p, group, rank);
  } else {
    take_registers<160>();
    const int consumer = group - kGroups;
    int before[kPair] = {};
    for (int i = 0; i < s.pieces(); ++i) {
      const int pair = static_cast<int>((cluster + i * clusters) % v_pairs);
      const int first_v = ((kPair * pair + rank) * kGroups + consumer) * kTile;
      const Segment& segment = s.segments[i];
      consume(s, p, segment, before, consumer, first_v, rank);
#pragma unroll
      for (int r = 0; r < kPair; ++r) before[r] += s.own_chunks(segment, r);
    }
  }
  sync_cluster();  // the other block writes nothing here any more
#endif
}

template <int kPieces>
void launch_paired_forward(const Problem& p, int64_t pieces, int64_t clusters,
                           cudaStream_t stream) {
  using SharedOfKernel = Shared<kPieces>;
  static_assert(sizeof(SharedOfKernel) <= 227 << 10);
  static const DynamicShared shared(paired_forward_kernel<kPieces>, sizeof(SharedOfKernel));
  shared.allow();
  launch_dependent<kPair>(paired_forward_kernel<kPieces>, kPair * clusters, kBlockThreads,
                          sizeof(SharedOfKernel), stream, p, pieces);
}

}  // namespace

void paired_forward(const Problem& p, cudaStream_t stream) {
  const int64_t pieces = segment_heads(p.grid, p.H) * value_pairs(p);
  if (pieces == 0) return;
  if (p.cluster_pieces == 1)
    launch_paired_forward<1>(p, pieces, pieces, stream);
  else
    launch_paired_forward<kMostPieces>(p, pieces, blocks_of(pieces, p.cluster_pieces), stream);
}

}  // namespace gla_ext::cuda::sm90
