// The drafted tokens of a row and head in shared memory, their scores A and their gated queries.
#pragma once

#include "run.cuh"

namespace gla_ext::cuda {

constexpr int kDrafts = 16;  // tokens of a draft, at most

// kK: the keys that a block takes at a time. It has as many threads; each warp works on 32 keys.
template <int kK>
constexpr int kWarps = kK / 32;

// scale q, k and a = exp gk in fp32; later q^_i = q_i a_0 .. a_i replaces q. Zero outside K.
template <int kK>
struct alignas(16) Drafts {
  float q[kDrafts][kK], k[kDrafts][kK], a[kDrafts][kK];
};

// A_ij = Σ_d q_id k_jd a_{j+1,d} .. a_id for j <= i: first sums over parts of 128 keys, then the
// whole sums in parts[0].
template <int kK>
struct Scores {
  static constexpr int kPairs = kDrafts * (kDrafts + 1) / 2;
  float parts[kK / 128][kPairs];

  __device__ __forceinline__ static int pair(int i, int j) { return i * (i + 1) / 2 + j; }
};

// Offset in elements from the start of a tensor to a drafted token's row.
__device__ __forceinline__ int64_t draft_offset(const Rows& r, const Run& run, int t) {
  return run.row * r.stride_b + head_offset(r, run.head) + (run.start + t) * r.stride_t;
}

// Loads an element in the format of memory: nothing waits for the load until the value is used.
__device__ __forceinline__ uint32_t load_element(const Rows& r, int64_t i, bool there) {
  if (!there) return 0;
  if (r.dtype == DType::kFloat) return static_cast<const uint32_t*>(r.data)[i];
  return static_cast<const uint16_t*>(r.data)[i];
}

// Four consecutive elements of a row, not yet converted to fp32: one per word, or two per word if
// 16-bit elements are loaded at once.
template <Access kAccess>
struct FourBits {
  uint32_t words[4];

  FourBits() = default;
  __device__ __forceinline__ FourBits(const Rows& r, int64_t i, int valid) {
    words[0] = words[1] = words[2] = words[3] = 0;
    if (r.data == nullptr) return;
    if constexpr (kAccess == Access::kGeneral) {
#pragma unroll
      for (int e = 0; e < 4; ++e) words[e] = load_element(r, i + e, e < valid);
    } else if (valid > 0 && r.dtype == DType::kFloat) {
      const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(r.data) + i);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if (valid > 0) {
      const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(r.data) + i);
      words[0] = x.x, words[1] = x.y;
    }
  }
  template <class F>
  __device__ __forceinline__ float4 map(DType dtype, F&& f) const {
    const bool packed = kAccess == Access::kFast && dtype != DType::kFloat;
    const auto at = [&](int e) {
      const uint32_t bits = packed ? words[e / 2] >> (16 * (e % 2)) & 0xffffu : words[e];
      return f(value_of(bits, dtype));
    };
    return make_float4(at(0), at(1), at(2), at(3));
  }
};

// A thread's elements before they are stored in shared memory: load i has four keys of token 4 i +
// threadIdx.x / (kK / 4). Tokens after the last one, up to a multiple of four, are zero, and so are
// keys from K on.
template <int kK, Access kAccess>
struct DraftBits {
  static constexpr int kLoads = kDrafts / 4;
  FourBits<kAccess> q[kLoads], k[kLoads], gk[kLoads];

  __device__ __forceinline__ void load(const Recurrence& p, const Run& run, int T, int first_key) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int t = token(i), from = first_key + key(), valid = t < T ? p.K - from : 0;
      if (4 * i >= T) break;
      q[i] = FourBits<kAccess>(p.q, draft_offset(p.q, run, t) + from, valid);
      k[i] = FourBits<kAccess>(p.k, draft_offset(p.k, run, t) + from, valid);
      gk[i] = FourBits<kAccess>(p.gk, draft_offset(p.gk, run, t) + from, valid);
    }
  }
  __device__ __forceinline__ void store(const Recurrence& p, int T, Drafts<kK>& s) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int t = token(i);
      if (4 * i >= T) break;
      *reinterpret_cast<float4*>(&s.q[t][key()]) =
          q[i].map(p.q.dtype, [&](float x) { return p.scale * x; });
      *reinterpret_cast<float4*>(&s.k[t][key()]) = k[i].map(p.k.dtype, [](float x) { return x; });
      *reinterpret_cast<float4*>(&s.a[t][key()]) = gk[i].map(p.gk.dtype, decay_of);
    }
  }

 private:
  __device__ __forceinline__ static int token(int i) {
    return 4 * i + static_cast<int>(threadIdx.x) / (kK / 4);
  }
  __device__ __forceinline__ static int key() { return threadIdx.x % (kK / 4) * 4; }
};

// Reduces 2 n numbers of each lane to n, by adding pairs of lanes that are 2 n apart.
template <int n>
__device__ __forceinline__ void fold(float (&x)[16]) {
  const bool upper = threadIdx.x & (2 * n);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float sent = upper ? x[i] : x[i + n];
    x[i] = (upper ? x[i + n] : x[i]) + __shfl_xor_sync(0xffffffffu, sent, 2 * n);
  }
}

// Sums each of sixteen numbers over a warp: lanes 2 n and 2 n + 1 get the sum of number n.
__device__ __forceinline__ float sums_of_warp(float (&x)[16]) {
  fold<8>(x);
  fold<4>(x);
  fold<2>(x);
  fold<1>(x);
  return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 1);
}

__device__ __forceinline__ float dot(const float4& x, const float (&y)[4]) {
  return fmaf(x.w, y[3], fmaf(x.z, y[2], fmaf(x.y, y[1], x.x * y[0])));
}

// A warp's partial sums of A, to which those of the keys before are added. The warp has tokens j =
// warp % 4, j + 4, .., whose keys are decayed step by step to the queries i, four at a time; it has
// 128 key channels, four per lane.
template <int kK>
__device__ __forceinline__ void score_parts(int T, const Drafts<kK>& s, Scores<kK>& scores,
                                            bool are_first) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_j = warp % 4, part = warp / 4, d = 128 * part + 4 * lane;
  const auto four = [&](const float (&x)[kDrafts][kK], int t) {
    return *reinterpret_cast<const float4*>(&x[t][d]);
  };
  float w[4][4]{};  // k_j a_{j+1} .. a_i
#pragma unroll 1
  for (int block = 0; 4 * block < T; ++block) {
    const float4 k = four(s.k, 4 * block + first_j);
    float sums[16];
#pragma unroll
    for (int ii = 0; ii < 4; ++ii) {
      const float4 q = four(s.q, 4 * block + ii), a = four(s.a, 4 * block + ii);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if (m == block && ii == first_j) {
          w[m][0] = k.x, w[m][1] = k.y, w[m][2] = k.z, w[m][3] = k.w;
        } else if (m < block || (m == block && ii > first_j)) {
          w[m][0] *= a.x, w[m][1] *= a.y, w[m][2] *= a.z, w[m][3] *= a.w;
        }
        const bool earlier = m < block || (m == block && ii >= first_j);
        sums[4 * ii + m] = earlier ? dot(q, w[m]) : 0.f;
      }
    }
    const float sum = sums_of_warp(sums);
    const int i = 4 * block + lane / 8, j = first_j + 4 * (lane / 2 % 4);
    if (lane % 2 == 0 && j <= i) {
      float& to = scores.parts[part][scores.pair(i, j)];
      to = are_first ? sum : to + sum;
    }
  }
}

// Sums A from its parts, once these have all keys, and replaces q by q^; both are zero for tokens
// that do not exist.
template <int kK>
__device__ __forceinline__ void gate_queries(int T, Drafts<kK>& s, Scores<kK>& scores,
                                             bool are_last) {
  if constexpr (kK > 128) {
    if (are_last && threadIdx.x < scores.kPairs) {
      float sum = scores.parts[0][threadIdx.x];
#pragma unroll
      for (int part = 1; part < kK / 128; ++part) sum += scores.parts[part][threadIdx.x];
      scores.parts[0][threadIdx.x] = sum;
    }
  }
  const int key = threadIdx.x;
  float decay = 1;
#pragma unroll
  for (int t = 0; t < kDrafts; ++t) {
    if (t < T) decay *= s.a[t][key];
    s.q[t][key] = t < T ? s.q[t][key] * decay : 0.f;
  }
}

}  // namespace gla_ext::cuda
