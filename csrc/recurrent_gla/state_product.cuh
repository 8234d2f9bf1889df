// Sᵀ q^ of one warp on tensor cores, with the accuracy of fp32: 32 keys, 32 values, 16 tokens.
//
// An operand is the sum of two tf32 numbers, high + low; the product of the low parts is left out.
// A bf16 or fp16 state is a tf32 number already. In a group of 16 keys, lane 4 r + c has keys 4 c
// .. 4 c + 3 of S and q^, so that a product of 8 keys takes two of them at a time (the order of
// keys does not matter), and both are loaded 16 bytes at a time.
#pragma once

#include "cuda/device/mma.cuh"
#include "drafts.cuh"

namespace gla_ext::cuda {

constexpr int kTileValues = 32;

// x rounded to the nearest tf32 number, and the remainder, of which tensor cores use the bits that
// tf32 has. NaN stays NaN in `low`.
struct Parts {
  float high, low;

  __device__ __forceinline__ Parts() {}
  __device__ __forceinline__ explicit Parts(float x) {
    high = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
    low = x - high;
  }
};

__device__ __forceinline__ int row_of_lane() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int column_of_lane() { return threadIdx.x % 4; }

// A lane's part of 16 keys of S:
//   [K, V]  fours[i] has key i of the lane's, values 4 r .. 4 r + 3
//   [V, K]  fours[i] has value 8 i + r, the keys of the lane
template <class State, bool kVFirst>
struct StateFours {
  static constexpr bool kExact = sizeof(State) == 2;  // whether tf32 holds the elements
  float fours[4][4];

  // `from` points to the lane's first number, at `key` and `value`.
  template <Access kAccess>
  __device__ __forceinline__ void load(const Recurrence& p, const State* from, int key, int value) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kVFirst)
        load4<kAccess>(fours[i], from + 8 * i * p.K, value + 8 * i < p.V ? p.K - key : 0);
      else
        load4<kAccess>(fours[i], from + i * p.V, key + i < p.K ? p.V - value : 0);
    }
  }
  // Call after every `load`, before the numbers are used.
  template <Access kAccess>
  __device__ __forceinline__ void unpack() {
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack4<kAccess, State>(fours[i]);
  }
  // Element of the lane's key 2 s + k and value 2 m + i.
  __device__ __forceinline__ float at(int s, int k, int m, int i) const {
    return kVFirst ? fours[2 * m + i][2 * s + k] : fours[2 * s + k][2 * m + i];
  }
};

// A lane's part of 16 keys of q^: tokens r and 8 + r.
struct QueryFours {
  Parts q[2][4];  // [token / 8][key]

  template <int kK>
  __device__ __forceinline__ void load(const Drafts<kK>& s, int first_key) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(
          &s.q[8 * n + row_of_lane()][first_key + 4 * column_of_lane()]);
      q[n][0] = Parts(x.x), q[n][1] = Parts(x.y), q[n][2] = Parts(x.z), q[n][3] = Parts(x.w);
      // Split now, once, not again for every tile.
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(q[n][i].low));
    }
  }
};

// A lane's part of Sᵀ q^: [m][token / 8][2 i + e], for the lane's values 2 m + i, tokens 2 c + e.
using Sums = float[2][2][4];

// sums += Sᵀ q^ of 16 keys; kFirst: sums start at 0. Small products are added first, because tensor
// cores truncate when they add: digits are then cut off small numbers.
template <bool kFirst, class State, bool kVFirst>
__device__ __forceinline__ void add_product(Sums& sums, const StateFours<State, kVFirst>& S,
                                            const QueryFours& q, bool more_than_eight) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float high[2][4], low[2][4];
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float number = S.at(s, e / 2, m, e % 2);
        if constexpr (S.kExact) {
          high[s][e] = number;
        } else {
          const Parts x(number);
          high[s][e] = x.high, low[s][e] = x.low;
        }
      }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (n == 1 && !more_than_eight) break;
      float (&c)[4] = sums[m][n];
      if (kFirst) c[0] = c[1] = c[2] = c[3] = 0;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if constexpr (!S.kExact) mma(c, low[s], q.q[n][2 * s].high, q.q[n][2 * s + 1].high);
        mma(c, high[s], q.q[n][2 * s].low, q.q[n][2 * s + 1].low);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) mma(c, high[s], q.q[n][2 * s].high, q.q[n][2 * s + 1].high);
    }
  }
}

}  // namespace gla_ext::cuda
