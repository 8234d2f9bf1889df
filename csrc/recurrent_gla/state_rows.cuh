// A block's tile of a state in registers: how it is loaded and stored, a token's step on it, and
// the resulting o.
#pragma once

#include "run.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// Tokens in shared memory at a time, so that 1,024 threads fit on a multiprocessor.
template <int kK>
constexpr int kStageTokens = kK == 64 ? 4 : 2048 / (kK > 256 ? kK : 256);

template <Access kAccess, class State>
__device__ __forceinline__ void store4(State* p, const float (&x)[4], int valid) {
  if constexpr (kAccess == Access::kFast && sizeof(State) == 2) {
    if (valid > 0)
      __stcs(reinterpret_cast<uint2*>(p),
             make_uint2(pack<State>(x[0], x[1]), pack<State>(x[2], x[3])));
  } else if constexpr (kAccess == Access::kFast) {
    if (valid > 0) __stcs(reinterpret_cast<float4*>(p), make_float4(x[0], x[1], x[2], x[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < valid) p[i] = from_float<State>(x[i]);
  }
}

// A block's tile of a [K, V] state: a thread has four values of every kGroups-th key. A token's o
// is summed over threads of several warps.
template <int kK>
struct KeyRows {
  static constexpr int kValues = (kK > 256 ? 2 : 1) * kTileElements / kK;
  static constexpr int kRows = 8, kThreads = kK * kValues / (4 * kRows);
  static constexpr int kFours = kValues / 4, kGroups = kThreads / kFours;
  static constexpr int kSums = kThreads / 32;  // sums that make up an o
  static constexpr int kResident = 1024;  // threads a multiprocessor, as many as registers allow
  float S[kRows][4];

  __device__ __forceinline__ static int value() { return threadIdx.x % kFours * 4; }
  __device__ __forceinline__ static int key(int i) {
    return i * kGroups + static_cast<int>(threadIdx.x) / kFours;
  }
  // Calls f(the four numbers, their offset in the matrix, how many of them exist).
  template <class F>
  __device__ __forceinline__ void for_fours(const Recurrence& p, int first_value, F&& f) {
    const int v = first_value + value();
#pragma unroll
    for (int i = 0; i < kRows; ++i) f(S[i], key(i) * p.V + v, key(i) < p.K ? p.V - v : 0);
  }
  template <bool kValueGates, class Tokens>
  __device__ __forceinline__ void step(const Tokens& s, int t, float (*s_o)[kValues]) {
    const float4 v = *reinterpret_cast<const float4*>(&s.v[t][value()]);
    const float4 b = *reinterpret_cast<const float4*>(&s.b[t][value()]);
    const float vs[4]{v.x, v.y, v.z, v.w}, bs[4]{b.x, b.y, b.z, b.w};
    float o[4]{};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float q = s.q[t][key(i)], k = s.k[t][key(i)], a = s.a[t][key(i)];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        S[i][c] = fmaf(k, vs[c], kValueGates ? a * S[i][c] * bs[c] : a * S[i][c]);
        o[c] = fmaf(q, S[i][c], o[c]);
      }
    }
#pragma unroll
    for (int lane = kFours; lane < 32; lane *= 2)
#pragma unroll
      for (int c = 0; c < 4; ++c) o[c] += __shfl_xor_sync(0xffffffffu, o[c], lane);
    if (threadIdx.x % 32 < kFours)
      *reinterpret_cast<float4*>(&s_o[threadIdx.x / 32][value()]) =
          make_float4(o[0], o[1], o[2], o[3]);
  }
};

// A block's tile of a [V, K] state: a thread has keys of one value, in fours. A token's o is summed
// over neighbouring lanes.
template <int kK>
struct ValueRows {
  static constexpr int kValues = (kK > 512 ? 2 : 1) * kTileElements / kK;
  static constexpr int kRows = 8, kThreads = kK * kValues / (4 * kRows);
  static constexpr int kLanes = kThreads / kValues, kSums = 1, kResident = 512;
  float S[kRows][4];

  __device__ __forceinline__ static int value() { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ __forceinline__ static int key(int i) {
    return (i * kLanes + static_cast<int>(threadIdx.x) % kLanes) * 4;
  }
  template <class F>
  __device__ __forceinline__ void for_fours(const Recurrence& p, int first_value, F&& f) {
    const int v = first_value + value();
#pragma unroll
    for (int i = 0; i < kRows; ++i) f(S[i], v * p.K + key(i), v < p.V ? p.K - key(i) : 0);
  }
  template <bool kValueGates, class Tokens>
  __device__ __forceinline__ void step(const Tokens& s, int t, float (*s_o)[kValues]) {
    const float v = s.v[t][value()], b = s.b[t][value()];
    float o = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 q4 = *reinterpret_cast<const float4*>(&s.q[t][key(i)]);
      const float4 k4 = *reinterpret_cast<const float4*>(&s.k[t][key(i)]);
      const float4 a4 = *reinterpret_cast<const float4*>(&s.a[t][key(i)]);
      const float q[4]{q4.x, q4.y, q4.z, q4.w}, k[4]{k4.x, k4.y, k4.z, k4.w};
      const float a[4]{a4.x, a4.y, a4.z, a4.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        S[i][c] = fmaf(k[c], v, kValueGates ? a[c] * S[i][c] * b : a[c] * S[i][c]);
        o = fmaf(q[c], S[i][c], o);
      }
    }
#pragma unroll
    for (int lane = 1; lane < kLanes; lane *= 2) o += __shfl_xor_sync(0xffffffffu, o, lane);
    if (threadIdx.x % kLanes == 0) s_o[0][value()] = o;
  }
};

template <class Tile, int kK, class F>
__device__ __forceinline__ void store_outputs(const Recurrence& p, const Run& run, int64_t first,
                                              int count, int first_value, F&& o) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count * Tile::kValues; i += Tile::kThreads) {
    const int t = i / Tile::kValues, j = i % Tile::kValues, value = first_value + j;
    if (value < p.V)
      store_any(p.o.data, p.o.dtype, row_offset(p, p.o, run, first + t) + value, o(t, j));
  }
}

template <class Tile, int kValues>
__device__ __forceinline__ float sum_of(const float (&o)[Tile::kSums][kValues], int j) {
  float sum = o[0][j];
#pragma unroll
  for (int i = 1; i < Tile::kSums; ++i) sum += o[i][j];
  return sum;
}

template <class Tile, int kK, bool kValueGates, int kTokens>
struct Stage {
  Operands<kTokens, kK, Tile::kValues, false> tokens;
  alignas(16) float o[kTokens][Tile::kSums][Tile::kValues];

  // Processes the next `count` tokens, which must be in `tokens`.
  __device__ __forceinline__ void run(const Recurrence& p, const Run& run, int64_t first, int count,
                                      int first_value, Tile& tile) {
    __syncthreads();  // the tokens are written
#pragma unroll 1
    for (int t = 0; t < count; ++t) tile.template step<kValueGates>(tokens, t, o[t]);
    if (p.o.data == nullptr) return;
    __syncthreads();  // o of every warp is written
    store_outputs<Tile, kK>(p, run, first, count, first_value,
                            [&](int t, int j) { return sum_of<Tile>(o[t], j); });
  }
};

// The state that a run continues from; null if there are no states, then it starts from 0.
template <class State>
__device__ __forceinline__ const State* state_at(const Recurrence& p, int64_t matrix) {
  return p.state_in == nullptr ? nullptr : static_cast<const State*>(p.state_in) + matrix;
}
template <class State, class Tile, Access kAccess>
__device__ __forceinline__ void load_state(const Recurrence& p, const State* from, int first_value,
                                           Tile& tile) {
  tile.for_fours(p, first_value, [&](float (&x)[4], int offset, int valid) {
    load4<kAccess>(x, from + offset, from != nullptr ? valid : 0);
  });
}
template <class State, class Tile, Access kAccess>
__device__ __forceinline__ void unpack_state(const Recurrence& p, int first_value, Tile& tile) {
  tile.for_fours(p, first_value, [&](float (&x)[4], int, int) { unpack4<kAccess, State>(x); });
}
template <class State, class Tile, Access kAccess>
__device__ __forceinline__ void store_state(const Recurrence& p, int64_t matrix, int first_value,
                                            Tile& tile) {
  tile.for_fours(p, first_value, [&](float (&x)[4], int offset, int valid) {
    store4<kAccess>(static_cast<State*>(p.state_out) + matrix + offset, x, valid);
  });
}

}  // namespace recurrent
}  // namespace gla_ext::cuda
