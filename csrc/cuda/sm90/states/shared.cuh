// The two sweeps of states.cu and the shared memory of a block.
#pragma once

#include "../sweep.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// The first of a unit with two members, the others of a warpgroup, two of each.
constexpr int kProducerBarrier = 1, kGatingBarrier = 2, kConsumerBarrier = 4;

// Which of the two sweeps, and whether it stores every chunk's state or its segment's own part.
enum class Sweep { kStates, kStateGrads };
enum class Store { kChunks, kSegment };

// A segment and head, worked on by kMembers warpgroups of either role: two, or one of two units.
template <int K, int kWarpgroups>
struct alignas(1024) Unit {
  static constexpr int kMembers = kWarpgroups;
  static constexpr int kValues = K == 128 ? 128 : kMembers * kTile;
  struct Stage {
    unsigned char y[K / 64 * kTileBytes];        // k or q [token][K], then gated
    unsigned char g[K / 64 * kTileBytes];        // [token][K]
    unsigned char x[kValues / 64 * kTileBytes];  // v or do [token][V]
  } stages[kStages];
  unsigned char state[K / 64 * (kValues / 64) * kTileBytes];  // [K][V]
  float b_last[K];                                            // log2 units
  float decay[kStages][K];                                    // 2^b_C
  uint64_t full[kStages], empty[kStages];
  int exact[kStages];
  Segment segment;
};

template <Sweep kSweep>
struct Fields {
  static constexpr bool kStates = kSweep == Sweep::kStates;
  static __device__ __forceinline__ const Rows& y(const Problem& p) { return kStates ? p.k : p.q; }
  static __device__ __forceinline__ const Rows& x(const Problem& p) {
    return kStates ? p.v : p.d_o;
  }
  static __device__ __forceinline__ const float* initial(const Problem& p) {
    return kStates ? p.h0 : p.dht;
  }
  static __device__ __forceinline__ float* final(const Problem& p) {
    return kStates ? p.ht : p.dh0;
  }
  static __device__ __forceinline__ float* segment_states(const Problem& p) {
    return kStates ? p.segment_states : p.segment_state_grads;
  }
  static __device__ __forceinline__ bf16* chunk_states(const Problem& p) {
    return static_cast<bf16*>(kStates ? p.S : p.dS);
  }
  // Whether nothing comes before, or follows, in the order of the sweep.
  static __device__ __forceinline__ bool begins(const Segment& s) {
    return kStates ? s.first : s.last;
  }
  static __device__ __forceinline__ bool ends(const Segment& s) {
    return kStates ? s.last : s.first;
  }
  static __device__ __forceinline__ int chunk(const Segment& s, int i) {
    return kStates ? i : s.chunks - 1 - i;
  }
};

}  // namespace
}  // namespace gla_ext::cuda::sm90
