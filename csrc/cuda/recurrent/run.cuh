// What one (sequence, head) of a recurrence is, and its tokens in shared memory.
#pragma once

#include "../device/gates.cuh"
#include "recurrence.h"

namespace gla_ext::cuda {

struct Run {
  int64_t row, start, length;  // batch row, first token, tokens
  int64_t state;               // n of its matrix; -1: it has none, and its results are zero
  int32_t head;
};

__device__ __forceinline__ int64_t index_at(const Indices& x, int64_t i) {
  return x.are_int64 ? static_cast<const int64_t*>(x.data)[i]
                     : static_cast<const int32_t*>(x.data)[i];
}

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// Runs of all heads; packed, the last of them are the tokens behind every sequence.
__host__ __device__ inline int64_t count_runs(const Recurrence& p) {
  return (p.N + (p.cu_seqlens.data != nullptr ? 1 : 0)) * p.H;
}

// Offsets are clamped to [0, T], so that wrong ones never lead outside a tensor.
__device__ __forceinline__ Run find_run(const Recurrence& p, int64_t index) {
  const int64_t n = index / p.H;
  Run run{n, 0, p.T, n, static_cast<int32_t>(index - n * p.H)};
  if (p.cu_seqlens.data != nullptr) {
    const int64_t end = n < p.N ? clamp(index_at(p.cu_seqlens, n + 1), 0, p.T) : p.T;
    run.row = 0;
    run.start = clamp(index_at(p.cu_seqlens, n), 0, p.T);
    run.length = end > run.start ? end - run.start : 0;
    if (n == p.N) run.state = -1;
  }
  if (p.slots.data != nullptr) {
    const int64_t slot = index_at(p.slots, n);
    run.state = slot < 0 || slot >= p.slots_in_pool ? -1 : slot;
  }
  if (p.accepted.data != nullptr) run.length = clamp(index_at(p.accepted, n), 0, p.T);
  return run;
}

// Elements from the start of a tensor to a token's row; `t` counts in the order of the recurrence.
__device__ __forceinline__ int64_t row_offset(const Recurrence& p, const Rows& r, const Run& run,
                                              int64_t t) {
  const int64_t token = run.start + (p.reverse ? run.length - 1 - t : t);
  return run.row * r.stride_b + token * r.stride_t + run.head * r.stride_h;
}

// exp of a gate, exactly 0 for a reset; NaN stays NaN.
__device__ __forceinline__ float decay_of(float g) { return g * kLog2E < kReset ? 0.f : expf(g); }

// Some tokens' rows in shared memory, in fp32 and zero outside K and V: scale q, k and exp gk of
// all keys; v, exp gv and, for backward, do of kValues values. Absent gates decay by 1.
template <int kTokens, int kK, int kValues, bool kBackward>
struct Operands {
  float q[kTokens][kK], k[kTokens][kK], a[kTokens][kK];
  float v[kTokens][kValues], b[kTokens][kValues];
  float d_o[kBackward ? kTokens : 1][kBackward ? kValues : 1];

  // Tokens first .. first + count - 1, with the values from first_value on.
  template <int kThreads>
  __device__ __forceinline__ void load(const Recurrence& p, const Run& run, int64_t first,
                                       int count, int first_value) {
    for (int i = threadIdx.x; i < count * kK; i += kThreads) {
      const int t = i / kK, key = i % kK;
      const bool inside = key < p.K;
      const auto element = [&](const Rows& r) {
        return load_any(r.data, r.dtype, row_offset(p, r, run, first + t) + key);
      };
      q[t][key] = inside && p.q.data != nullptr ? p.scale * element(p.q) : 0.f;
      k[t][key] = inside ? element(p.k) : 0.f;
      a[t][key] = p.gk.data == nullptr ? 1.f : inside ? decay_of(element(p.gk)) : 0.f;
    }
    for (int i = threadIdx.x; i < count * kValues; i += kThreads) {
      const int t = i / kValues, j = i % kValues, value = first_value + j;
      const bool inside = value < p.V;
      const auto element = [&](const Rows& r) {
        return load_any(r.data, r.dtype, row_offset(p, r, run, first + t) + value);
      };
      v[t][j] = inside ? element(p.v) : 0.f;
      b[t][j] = p.gv.data == nullptr ? 1.f : inside ? decay_of(element(p.gv)) : 0.f;
      if constexpr (kBackward) d_o[t][j] = inside ? element(p.d_o) : 0.f;
    }
  }
};

// Key channels that a kernel is built for: the least power of two from 64 on that is enough.
template <class F>
void with_keys(int K, F&& f) {
  if (K <= 64) return f(std::integral_constant<int, 64>{});
  if (K <= 128) return f(std::integral_constant<int, 128>{});
  if (K <= 256) return f(std::integral_constant<int, 256>{});
  return f(std::integral_constant<int, 512>{});
}

}  // namespace gla_ext::cuda
