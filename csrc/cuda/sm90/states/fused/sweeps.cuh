// The two sweeps of backward: their inputs, outputs and initial states.
#pragma once

#include "cuda/sm90/segments/segment.cuh"

namespace gla_ext::cuda::sm90::states {

// Whether a sweep stores the state of every chunk, or its segment's summary.
enum class Store { kChunks, kSegment };

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
  // Index of the state that enters the segment in the order of the sweep.
  static __device__ __forceinline__ int64_t state(const Segment& s) {
    return kStates ? s.state : s.last_state;
  }
  // Whether the segment is the sweep's first one of the sequence (begins) or its last one (ends).
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

// Loads the state, or its gradient, from which a sweep over a segment starts. `state` must be zero
// before.
template <Sweep kSweep, class State>
__device__ __forceinline__ void load_entering(State& state, const Problem& p,
                                              const Segment& segment) {
  using F = Fields<kSweep>;
  const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
  if (!F::begins(segment))
    state.load(p, F::segment_states(p) + F::state(segment) * matrix, false);
  else if (F::initial(p) != nullptr)
    state.load(p, F::initial(p) + (segment.n * p.H + segment.head) * matrix, p.state_v_first);
}

}  // namespace gla_ext::cuda::sm90::states
