// The state of the forward sweeps, transposed, in the registers of a warpgroup, since o needs it as
// the A operand of a product. states/fused/state.cuh holds it as [K][V], for sweeps that only add
// to it and write it.
#pragma once

#include <type_traits>

#include "cuda/sm90/segments/segment.cuh"
#include "cuda/sm90/tiles/channels.cuh"
#include "cuda/sm90/tiles/tiles.cuh"

namespace gla_ext::cuda::sm90::forward {

// A single factor of all key channels, by which the state leaves a chunk. The state is multiplied
// by it after the operand for the chunk's queries is made.
struct Leaving {
  float decay;
};

// The part of the state that a consumer holds: [64 values][K], key channels from `first_k` on.
template <int K>
struct State {
  static constexpr int kChannels = K;
  float x[K / 2];
  int first_k = 0;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < K / 2; ++i) x[i] = 0;
  }

  // Calls f(x, key, value) for each element of thread number `thread` of the block.
  template <class F>
  __device__ __forceinline__ void for_elements(const Problem& p, int first_v, int thread, F&& f) {
    const int lane = thread % 32, row = thread % kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < K / 2; ++i) {
      const int v = first_v + row + i / 2 % 2 * 8, k = first_k + i / 4 * 8 + 2 * (lane % 4) + i % 2;
      if (v < p.V && k < p.K) f(x[i], k, v);
    }
  }

  // entering_v_first: segment_states are stored as [V][K].
  __device__ __forceinline__ void load(const Problem& p, const Segment& segment, int first_v,
                                       int thread = static_cast<int>(threadIdx.x),
                                       bool entering_v_first = false) {
    clear();
    if (!segment.first || starts_from_scan(p, segment)) {
      const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
      const float* entering = p.segment_states + segment.state * matrix;
      for_elements(p, first_v, thread, [&](float& y, int k, int v) {
        y = entering[entering_v_first ? v * p.K + k : k * p.V + v];
      });
      return;
    }
    const StateMatrix initial = initial_state(p, segment.n, segment.head);
    if (initial.data == nullptr) return;
    initial.with_elements([&](const auto* elements) {
      for_elements(p, first_v, thread, [&](float& y, int k, int v) {
        y = to_float(elements[p.state_v_first ? v * p.K + k : k * p.V + v]);
      });
    });
  }

  __device__ __forceinline__ void store(const Problem& p, const Segment& segment, int first_v,
                                        int thread = static_cast<int>(threadIdx.x)) {
    if (!segment.last) return;
    write(p, final_state(p, segment.n, segment.head), first_v, thread, [](int) { return 1.f; });
  }

  // Writes the state times factor(key channel - first_k).
  template <class Factor>
  __device__ __forceinline__ void write(const Problem& p, const StateMatrix& to, int first_v,
                                        int thread, Factor&& factor) {
    if (to.data == nullptr) return;
    to.with_elements([&](auto* elements) {
      using Element = std::remove_reference_t<decltype(*elements)>;
      for_elements(p, first_v, thread, [&](float y, int k, int v) {
        elements[p.state_v_first ? v * p.K + k : k * p.V + v] =
            from_float<Element>(y * factor(k - first_k));
      });
    });
  }

  // Multiplies kKeys key channels, starting at `first`, by factors in the order of `quad_index`,
  // and makes a product's operand of them.
  template <int kKeys>
  __device__ __forceinline__ void pass(int first, const float* factors,
                                       uint32_t (&operand)[kKeys / 16][4]) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      const float* y = pass_quads(first + 16 * j, factors, t);
#pragma unroll
      for (int e = 0; e < 4; ++e) operand[j][e] = pack(y[2 * e], y[2 * e + 1]);
    }
  }
  // Makes an operand of the key channels, then multiplies the channels by one factor.
  template <int kKeys>
  __device__ __forceinline__ void pass(int first, Leaving leaving,
                                       uint32_t (&operand)[kKeys / 16][4]) {
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      float* y = x + (first + 16 * j) / 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) operand[j][e] = pack(y[2 * e], y[2 * e + 1]);
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] *= leaving.decay;
    }
  }
  // Like the previous one, with a second operand for the part that rounding to bf16 loses.
  template <int kKeys>
  __device__ __forceinline__ void pass(int first, Leaving leaving, uint32_t (&high)[kKeys / 16][4],
                                       uint32_t (&low)[kKeys / 16][4]) {
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      float* y = x + (first + 16 * j) / 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        high[j][e] = pack(y[2 * e], y[2 * e + 1]);
        const float2 rounded = unpack(high[j][e]);
        low[j][e] = pack(y[2 * e] - rounded.x, y[2 * e + 1] - rounded.y);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] *= leaving.decay;
    }
  }
  // Multiplies by factors in the order of `quad_index`, without an operand.
  __device__ __forceinline__ void pass(const float* factors) {
#pragma unroll
    for (int k = 0; k < K; k += 16) pass_quads(k, factors, static_cast<int>(threadIdx.x) % 4);
  }
  // Index of a key channel's factor in an order that makes the four channels adjacent that a thread
  // holds of each sixteen.
  static __device__ __forceinline__ int quad_index(int channel) {
    return channel / 16 * 16 + channel % 8 / 2 * 4 + channel / 8 % 2 * 2 + channel % 2;
  }
  // Multiplies by one factor.
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < K / 2; ++i) x[i] *= factor;
  }
  // Multiplies by factors in the order of the key channels.
  __device__ __forceinline__ void scale(const float* factors) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < K / 8; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * t);
      x[4 * j] *= f.x;
      x[4 * j + 1] *= f.y;
      x[4 * j + 2] *= f.x;
      x[4 * j + 3] *= f.y;
    }
  }

 private:
  // Multiplies the sixteen channels from `first` on and returns a pointer to the first of their
  // elements. t: the lane's index in its quad.
  __device__ __forceinline__ float* pass_quads(int first, const float* factors, int t) {
    const float4 f = *reinterpret_cast<const float4*>(factors + first + 4 * t);
    float* y = x + first / 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      y[2 * e] *= f.x;
      y[2 * e + 1] *= f.y;
      y[4 + 2 * e] *= f.z;
      y[4 + 2 * e + 1] *= f.w;
    }
    return y;
  }
};

// Writes a checkpoint if one ends at this chunk. leave: factors by which the state leaves the
// chunk, in the order of the key channels.
template <int K>
__device__ __forceinline__ void keep_state(const Problem& p, const Segment& segment, int chunk,
                                           State<K>& state, int first_v, const float* leave) {
  const StateMatrix kept = checkpoint_after(p, segment, chunk);
  if (kept.data != nullptr)  // thread_index(): no address is computed before
    state.write(p, kept, first_v, thread_index(), [&](int k) { return leave[k]; });
}

}  // namespace gla_ext::cuda::sm90::forward
