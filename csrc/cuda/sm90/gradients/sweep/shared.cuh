// The shared memory of a block of gradients/sweep, and its barriers.
#pragma once

#include "cuda/sm90/gradients/common/warps.cuh"
#include "cuda/sm90/prepare/prepared.cuh"
#include "cuda/sm90/states/fused/state.cuh"
#include "cuda/sm90/states/fused/sweeps.cuh"
#include "cuda/sm90/states/tiles.cuh"
#include "cuda/sm90/tiles/channels.cuh"
#include "cuda/sm90/tiles/cluster.cuh"
#include "cuda/sm90/tiles/products.cuh"
#include "cuda/sm90/tiles/triangle.cuh"

namespace gla_ext::cuda::sm90::gradients::sweep {

using states::Fields, states::load_entering, states::State;

constexpr int kClusterBlocks = 2;  // blocks of a cluster
// Warpgroups of a block. Two consumers take the chunks in turn.
enum Role { kProducer, kState, kConsumer, kRoles = kConsumer + 2 };
constexpr int kConsumers = kRoles - kConsumer;
constexpr int kSweepThreads = kRoles * kGroupThreads;
constexpr int kStateStages = 2, kQueryStages = 3;

// 64 value channels of a chunk.
struct Slice {
  Tile S;    // [64 of K][64 values]
  Tile v;    // [token][64 values], right after S: one operand of 128 rows
  Tile d_o;  // [token][64 values]
};

// The part of a chunk that does not depend on values and is read by the state's warpgroup, which is
// ahead, and by a consumer.
struct alignas(1024) Queries {
  Tile q;                                          // q^ [token][64 of K]
  float factors[kFactors][kClusterBlocks][kTile];  // of both blocks' channels

  // These overwrite factors that are no longer read. states: rowsum(S dS'). inter: the contribution
  // to dg of k through dS~, summed over the rows of a warp.
  __device__ __forceinline__ float* states(int rank) { return factors[kSum][rank]; }
  __device__ __forceinline__ float* inter(int rank, int warp) { return factors[warp][1 - rank]; }
};
static_assert(kFactors == kGroupWarps);
// The rest of that part, read only by a consumer.
struct alignas(1024) Keys {
  Tile k[kKeyTiles];  // k^ [token][K]
  Tile A;             // [token][token]
};

// Memory of one consumer.
template <class Gate>
struct alignas(1024) Own {
  // bf16 gates: the gates [token][64 of K], replaced by dg before it is stored. fp32 gates:
  // exponents of dq and dk, fp32 [token][64 of K].
  Tile tiles[sizeof(Gate) / sizeof(bf16)];
  float gates[kSubChunks][kTile], dg[kSubChunks][kTile];  // sums over each sub-chunk
  // Overwrites dg's first sums: the contribution to dg of the states that enter and leave the
  // chunk.
  __device__ __forceinline__ float* states() { return dg[0]; }
};

template <class GateOfKernel>
struct Shared {
  using Gate = GateOfKernel;
  static constexpr int kSliceStages = sizeof(Gate) == 2 ? 4 : 3;
  Slice slices[kSliceStages];
  // dS~ [64 of K][64 values], from the state's warpgroup.
  Tile dS[kStateStages];
  Queries queries[kQueryStages];
  Keys keys[kConsumers];
  // The other block's dS~ of values whose dv this block makes, replaced by dv before it is stored.
  Tile received[kClusterBlocks];
  Own<Gate> own[kConsumers];
  // full: a slice's rows and tile have arrived. empty: they have been read.
  uint64_t full[kSliceStages], empty[kSliceStages];
  // ready: dS~ of a slice is written. taken: it has been read here and in the block to which it was
  // sent.
  uint64_t ready[kStateStages], taken[kStateStages];
  int4 strong[kQueryStages];  // the first word is the flag
  // Barriers of a chunk. queries_full: q^ and factors have arrived. states_full: the states' sums
  // are written; the state's warpgroup may be two chunks ahead.
  uint64_t queries_full[kQueryStages], states_full[kQueryStages];
  // Barriers of a consumer. keys_full: its keys have arrived. chunk_empty: it has read its chunk.
  uint64_t keys_full[kConsumers], chunk_empty[kConsumers];
  uint64_t received_full[kClusterBlocks];
  uint64_t turn[kConsumers];  // the other consumer has left its slices
  // The factor by which dS~ leaves one chunk; then that times the factor for entering the next.
  float factors[kTile];
  Segment segment;
};

// The stage and the parity of successive uses of a ring.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    asm volatile("" : "+r"(stage), "+r"(parity));  // computing them ahead would take registers
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  template <int kSteps>
  __device__ __forceinline__ void skip() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) next();
  }
};

// The tile that receives dS~ of slice j of the i-th chunk. Only every second slice is received:
// those whose dv the receiver makes.
template <int kSlices>
__device__ __forceinline__ int received_place(int i, int j) {
  return (i * (kSlices / kClusterBlocks) + j / kClusterBlocks) % kClusterBlocks;
}
template <int kSlices>
__device__ __forceinline__ uint32_t received_parity(int i) {
  return i * (kSlices / kClusterBlocks) / kClusterBlocks & 1;
}

// Sets up the barriers and finds segment number `index`. Called by one thread.
template <class SharedOfKernel>
__device__ __forceinline__ void start(SharedOfKernel& s, const Problem& p, int64_t index) {
  s.segment = find_segment<false>(p, index);
  for (int i = 0; i < s.kSliceStages; ++i) {
    init_barrier(&s.full[i], kGroupThreads + 1);             // including the copy of a tile of S~
    init_barrier(&s.empty[i], kGroupThreads + kGroupWarps);  // of the state, of a consumer
  }
  for (int i = 0; i < kStateStages; ++i) {
    init_barrier(&s.ready[i], kGroupWarps);
    init_barrier(&s.taken[i], 2 * kGroupWarps);  // of two consumers, here or in the other block
  }
  for (int i = 0; i < kQueryStages; ++i) {
    init_barrier(&s.queries_full[i], 3);  // bulk copies
    init_barrier(&s.states_full[i], kGroupThreads);
  }
  for (int i = 0; i < kConsumers; ++i) {
    init_barrier(&s.keys_full[i], 2);  // bulk copies
    init_barrier(&s.chunk_empty[i], kGroupThreads);
    init_barrier(&s.turn[i], kGroupWarps);
  }
  for (int i = 0; i < kClusterBlocks; ++i) init_barrier(&s.received_full[i], 1);
  fence_barriers();
  fence_for_products();  // also for bulk copies
}

// Copies the part of a sweep's i-th chunk that does not depend on values. Its stages must be free.
// Called by one thread.
template <class SharedOfKernel>
__device__ __forceinline__ void load_queries(SharedOfKernel& s, const Problem& p, int i, int rank) {
  if (i >= s.segment.chunks) return;
  const int stage = i % kQueryStages;
  const unsigned char* operands = prepared_at(p, s.segment.chunk_head(p, chunk_of(s.segment, i)));
  uint64_t* full = &s.queries_full[stage];
  bulk_copy(&s.queries[stage].q, operands + rank * kTileBytes, kTileBytes, full);
  bulk_copy(s.queries[stage].factors, operands + offsetof(KeyGroup, factors), kFactorBytes, full);
  bulk_copy(&s.strong[stage], operands + offsetof(PreparedChunk<1>, strong),
            sizeof(s.strong[stage]), full);
}
template <class SharedOfKernel>
__device__ __forceinline__ void load_keys(SharedOfKernel& s, const Problem& p, int i) {
  if (i >= s.segment.chunks) return;
  const unsigned char* operands = prepared_at(p, s.segment.chunk_head(p, chunk_of(s.segment, i)));
  Keys& to = s.keys[i % kConsumers];
  uint64_t* full = &s.keys_full[i % kConsumers];
  bulk_copy(to.k, operands + offsetof(KeyGroup, k), kKeyTiles * kTileBytes, full);
  bulk_copy(&to.A, operands + offsetof(PreparedChunk<1>, A), kTileBytes, full);
}

}  // namespace gla_ext::cuda::sm90::gradients::sweep
