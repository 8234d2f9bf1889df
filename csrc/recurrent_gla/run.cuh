// A run, i.e. one (sequence, head) of a recurrence, and its tokens in shared memory.
#pragma once

#include <type_traits>

#include "cuda/device/element.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/device/indices.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda {

// Elements of a state in a block; forward above 512 keys has twice as many.
constexpr int kTileElements = 8192;

struct Run {
  int64_t row, start, length;  // batch row, first token, tokens
  int64_t state;               // n of its matrix; -1: no state, and the results are zero
  int32_t head;
};

// The number of runs of all heads. In packed batches the last ones are the tokens after every
// sequence.
__host__ __device__ inline int64_t count_runs(const Recurrence& p) {
  return (p.N + (p.cu_seqlens.data != nullptr ? 1 : 0)) * p.H;
}

// Offsets are clamped to [0, T], so that wrong offsets never lead outside a tensor.
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
  if (p.slots.data != nullptr && run.state >= 0) {
    const int64_t slot = index_at(p.slots, n);
    run.state = slot < 0 || slot >= p.slots_in_pool ? -1 : slot;
  }
  if (p.accepted.data != nullptr && n < p.N)
    run.length = clamp(index_at(p.accepted, n), 0, run.length);
  return run;
}

// Offset in elements from the start of a tensor to a token's row; `t` counts in the order of the
// recurrence.
__device__ __forceinline__ int64_t row_offset(const Recurrence& p, const Rows& r, const Run& run,
                                              int64_t t) {
  const int64_t token = run.start + (p.reverse ? run.length - 1 - t : t);
  return run.row * r.stride_b + token * r.stride_t + head_offset(r, run.head);
}

// exp of a gate; exactly 0 for a reset. NaN stays NaN.
__device__ __forceinline__ float decay_of(float g) { return g * kLog2E < kReset ? 0.f : expf(g); }

// load_bits loads an element in the format of memory (0 if not `there`), value_of converts it. They
// are separate, so that several loads are issued before the first is waited for.
__device__ __forceinline__ uint32_t load_bits(const Rows& r, int64_t i, bool there) {
  const bool wide = r.dtype == DType::kFloat;
  uint32_t bits = 0;
  uint16_t half_bits = 0;
  if (there && wide) bits = static_cast<const uint32_t*>(r.data)[i];
  if (there && !wide) half_bits = static_cast<const uint16_t*>(r.data)[i];
  return wide ? bits : half_bits;
}
__device__ __forceinline__ float value_of(uint32_t bits, DType dtype) {
  if (dtype == DType::kHalf) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return __uint_as_float(dtype == DType::kFloat ? bits : bits << 16);
}

// One key of q, k and gk, and one value of v, gv and, for backward, do, loaded before they are
// stored in shared memory.
struct KeyBits {
  uint32_t q, k, gk;

  __device__ __forceinline__ KeyBits() {}
  __device__ __forceinline__ KeyBits(const Recurrence& p, const Run& run, int64_t t, int key) {
    const bool inside = key < p.K;
    q = load_bits(p.q, row_offset(p, p.q, run, t) + key, inside && p.q.data != nullptr);
    k = load_bits(p.k, row_offset(p, p.k, run, t) + key, inside);
    gk = load_bits(p.gk, row_offset(p, p.gk, run, t) + p.gk_step * key,
                   inside && p.gk.data != nullptr);
  }
};
struct ValueBits {
  uint32_t v, gv, d_o;

  __device__ __forceinline__ ValueBits() {}
  __device__ __forceinline__ ValueBits(const Recurrence& p, const Run& run, int64_t t, int value) {
    const bool inside = value < p.V;
    v = load_bits(p.v, row_offset(p, p.v, run, t) + value, inside);
    gv = load_bits(p.gv, row_offset(p, p.gv, run, t) + value, inside && p.gv.data != nullptr);
    d_o = load_bits(p.d_o, row_offset(p, p.d_o, run, t) + value, inside && p.d_o.data != nullptr);
  }
};

// Loads four numbers of a state. Only the first `valid` exist; the others are 0. A state is
// accessed once a call, so it need not stay in the caches. 16-bit numbers that are loaded at once
// remain in x in the format of memory until `unpack4`, so that nothing waits for the load.
template <Access kAccess, class State>
__device__ __forceinline__ void load4(float (&x)[4], const State* p, int valid) {
  if constexpr (kAccess == Access::kFast && sizeof(State) == 2) {
    const uint2 y = valid > 0 ? __ldcs(reinterpret_cast<const uint2*>(p)) : make_uint2(0, 0);
    x[0] = __uint_as_float(y.x), x[1] = __uint_as_float(y.y);
  } else if constexpr (kAccess == Access::kFast) {
    const float4 y =
        valid > 0 ? __ldcs(reinterpret_cast<const float4*>(p)) : make_float4(0, 0, 0, 0);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = i < valid ? to_float(p[i]) : 0.f;
  }
}
template <Access kAccess, class State>
__device__ __forceinline__ void unpack4(float (&x)[4]) {
  if constexpr (kAccess == Access::kFast && sizeof(State) == 2) {
    const uint32_t words[2]{__float_as_uint(x[0]), __float_as_uint(x[1])};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = element_of<State>(words, i);
  }
}

// Rows of some tokens in shared memory, in fp32. For all keys: q times scale, k and the decay
// a = exp(gk). For kValues values: v, the decay b = exp(gv) and, in backward, d_o. Outside K and V
// the rows are 0 and the decays 1; decays are also 1 where there is no gate.
template <int kTokens, int kK, int kValues, bool kBackward>
struct alignas(16) Operands {
  float q[kTokens][kK], k[kTokens][kK], a[kTokens][kK];
  float v[kTokens][kValues], b[kTokens][kValues];
  float d_o[kBackward ? kTokens : 1][kBackward ? kValues : 1];

  __device__ __forceinline__ void put(const Recurrence& p, int t, int key, const KeyBits& x) {
    q[t][key] = p.scale * value_of(x.q, p.q.dtype);
    k[t][key] = value_of(x.k, p.k.dtype);
    a[t][key] = decay_of(value_of(x.gk, p.gk.dtype));
  }
  __device__ __forceinline__ void put(const Recurrence& p, int t, int j, const ValueBits& x) {
    v[t][j] = value_of(x.v, p.v.dtype);
    b[t][j] = decay_of(value_of(x.gv, p.gv.dtype));
    if constexpr (kBackward) d_o[t][j] = value_of(x.d_o, p.d_o.dtype);
  }

  // Loads `count` tokens from `first` on, with the values from `first_value` on.
  template <int kThreads>
  __device__ __forceinline__ void load(const Recurrence& p, const Run& run, int64_t first,
                                       int count, int first_value) {
    for (int i = threadIdx.x; i < count * kK; i += kThreads)
      put(p, i / kK, i % kK, KeyBits(p, run, first + i / kK, i % kK));
    for (int i = threadIdx.x; i < count * kValues; i += kThreads)
      put(p, i / kValues, i % kValues,
          ValueBits(p, run, first + i / kValues, first_value + i % kValues));
  }
};

// The part of one token that a thread loads while it also loads the state.
template <int kThreads, int kK, int kValues>
struct TokenBits {
  static constexpr int kEach = kK <= kThreads ? 1 : kK / kThreads;
  KeyBits keys[kEach];
  ValueBits value;

  __device__ __forceinline__ TokenBits(const Recurrence& p, const Run& run, int first_value) {
    load_keys(p, run);
    if (threadIdx.x < kValues) value = ValueBits(p, run, 0, first_value + threadIdx.x);
  }
  __device__ __forceinline__ TokenBits() {}
  __device__ __forceinline__ void load_keys(const Recurrence& p, const Run& run) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (key(i) < kK) keys[i] = KeyBits(p, run, 0, key(i));
  }
  template <class Tokens>
  __device__ __forceinline__ void store(const Recurrence& p, Tokens& tokens) const {
    store_keys(p, tokens);
    if (threadIdx.x < kValues) tokens.put(p, 0, static_cast<int>(threadIdx.x), value);
  }
  template <class Tokens>
  __device__ __forceinline__ void store_keys(const Recurrence& p, Tokens& tokens) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (key(i) < kK) tokens.put(p, 0, key(i), keys[i]);
  }

 private:
  __device__ __forceinline__ static int key(int i) {
    return i * kThreads + static_cast<int>(threadIdx.x);
  }
};

// Chooses the tiles of values per block that minimise the time of all blocks, `resident` of which
// run at once. The tokens take as long as `of_tokens` tiles.
inline int choose_tiles(int64_t runs, int tiles, int64_t resident, int of_tokens) {
  int best = tiles;
  int64_t least = 0;
  for (int each = tiles; each > 0; --each) {
    const int64_t waves = (runs * blocks_of(tiles, each) + resident - 1) / resident;
    const int64_t time = waves * (of_tokens + each);
    if (each == tiles || time < least) best = each, least = time;
  }
  return best;
}

// Calls f with the number of key channels of the kernel: the smallest power of two from 64 on that
// is at least K.
template <class F>
void with_keys(int K, F&& f) {
  if (K <= 64) return f(std::integral_constant<int, 64>{});
  if (K <= 128) return f(std::integral_constant<int, 128>{});
  if (K <= 256) return f(std::integral_constant<int, 256>{});
  if (K <= 512) return f(std::integral_constant<int, 512>{});
  return f(std::integral_constant<int, 1024>{});
}

}  // namespace gla_ext::cuda
