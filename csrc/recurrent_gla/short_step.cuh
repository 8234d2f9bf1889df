// One token step on bf16 or fp16 states whose rows are multiples of eight numbers (16 bytes).
//
// grid    (row, head, kValues values); a block has all keys of these values. All copies to shared
//         memory are issued at once, and a thread reads from there what it has copied
// reads   q, k, gk [B, 1, H, K], v, gv [B, 1, H, V], state_in [.., H, K, V] or v-first
// writes  o [B, 1, H, V], state_out
// With fp32 states, loading the bytes hides the arithmetic; with half as many bytes it does not. So
// a number takes only 4.5 instructions from unpacking to packing, and everything else is done for
// eight numbers at once. Sums over keys have the order of state_rows.cuh: o has the same bits as
// with fp32 states.
#pragma once

#include "cuda/device/capability.h"
#include "cuda/device/dynamic_shared.h"
#include "cuda/sm90/tiles/ptx.cuh"
#include "forward.cuh"

namespace gla_ext::cuda {
namespace recurrent {

constexpr int kChain = 8;  // keys, or fours of keys, that a sum adds in sequence
template <int kK>
constexpr int kShortValues = 32768 / (kK > 256 ? kK : 256);  // values of a block
// Steps whose states a thread has in registers at once. From compute capability 10.0 on, registers
// would spill with two of them and gates on values.
template <bool kValueGates>
constexpr int kShortSteps = kValueGates && kMajor >= 10 ? 1 : 2;

template <bool kValueGates>
__device__ __forceinline__ float moved(float S, float a, float b, float k, float v) {
  return fmaf(k, v, kValueGates ? a * S * b : a * S);
}
template <class State>
__device__ __forceinline__ void pack8(Eight<State>& to, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to.words[i] = pack<State>(x[2 * i], x[2 * i + 1]);
}
__device__ __forceinline__ void load8_floats(float (&x)[8], const float* from) {
  const Eight<float> y = load8_aligned(from);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

// A block's tile of a [K, V] state: per step, a thread has eight values of one or two keys. Each o
// has kK / kChain sums. The sums of a part are added in pairs, then the parts in order.
template <int kK>
class ShortKeyRows {
  static constexpr int kParts = KeyRows<kK>::kSums, kSums = KeyRows<kK>::kGroups;
  static constexpr int kOfPart = kSums / kParts;
  static_assert(KeyRows<kK>::kRows == kChain);

 public:
  static constexpr int kValues = kShortValues<kK>;

 private:
  static constexpr int kEights = kValues / 8;
  // Sums of a part that are in different lanes of a warp; the others are in the same thread.
  static constexpr int kLanes = kOfPart < 32 / kEights ? kOfPart : 32 / kEights;

 public:
  static constexpr int kEach = kOfPart / kLanes;  // eights of a thread per step
  static constexpr int kThreads = kEights * kLanes * kParts;
  static_assert(kEach <= 2);

  struct Shared {
    uint4 state[kChain][kEach][kThreads];
    float4 keys[kK];  // k, decay, q
    alignas(16) float v[kValues], b[kValues];
    alignas(16) float parts[kParts][kValues];

    __device__ __forceinline__ void put(const Recurrence& p, int, int key, const KeyBits& x) {
      keys[key] = make_float4(value_of(x.k, p.k.dtype), decay_of(value_of(x.gk, p.gk.dtype)),
                              p.scale * value_of(x.q, p.q.dtype), 0.f);
    }
    __device__ __forceinline__ void put(const Recurrence& p, int, int j, const ValueBits& x) {
      v[j] = value_of(x.v, p.v.dtype);
      b[j] = decay_of(value_of(x.gv, p.gv.dtype));
    }
  };

  __device__ __forceinline__ ShortKeyRows(const Recurrence& p, int first_value) {
    const int sums = static_cast<int>(threadIdx.x) / kEights;
    lane_ = sums % kLanes, part_ = sums / kLanes;
    key_ = part_ * kOfPart + lane_ * kEach;
    column_ = static_cast<int>(threadIdx.x) % kEights * 8;
    keys_left_ = first_value + column_ < p.V ? p.K - key_ : 0;
  }
  // start: the index of the thread's first number in a matrix. eight_bytes, step_bytes: bytes from
  // one eight to the next, and from one step to the next.
  __device__ __forceinline__ int start(const Recurrence& p, int first_value) const {
    return key_ * p.V + first_value + column_;
  }
  __device__ __forceinline__ static int eight_bytes(const Recurrence& p) { return 2 * p.V; }
  __device__ __forceinline__ static int step_bytes(const Recurrence& p) { return kSums * 2 * p.V; }
  __device__ __forceinline__ bool there(int step, int eight) const {
    return step * kSums + eight < keys_left_;
  }

  __device__ __forceinline__ void load_token(const Recurrence& p, const Run& run, int first_value,
                                             Shared& s) const {
    const TokenBits<kThreads, kK, kValues> token(p, run, first_value);
    token.store(p, s);
  }
  // Called after the token is written.
  template <bool kValueGates>
  __device__ __forceinline__ void take_token(const Shared& s) {
    load8_floats(v_, &s.v[column_]);
    if constexpr (kValueGates) load8_floats(b_, &s.b[column_]);
  }
  template <bool kValueGates, class State>
  __device__ __forceinline__ void move(const Shared& s, int step, Eight<State> (&S)[kEach]) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float4 t = s.keys[key_ + step * kSums + j];
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        x[c] = moved<kValueGates>(S[j][c], t.y, b_[c], t.x, v_[c]);
        o_[j][c] = fmaf(t.z, x[c], o_[j][c]);
      }
      pack8(S[j], x);
    }
  }
  __device__ __forceinline__ void store_outputs(const Recurrence& p, const Run& run,
                                                int first_value, Shared& s) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float& o = o_[0][c];
      if constexpr (kEach == 2) o += o_[1][c];
#pragma unroll
      for (int lane = kEights; lane < kEights * kLanes; lane *= 2)
        o += __shfl_xor_sync(0xffffffffu, o, lane);
    }
    if (lane_ == 0) {
      auto* to = reinterpret_cast<float4*>(&s.parts[part_][column_]);
      to[0] = make_float4(o_[0][0], o_[0][1], o_[0][2], o_[0][3]);
      to[1] = make_float4(o_[0][4], o_[0][5], o_[0][6], o_[0][7]);
    }
    __syncthreads();  // every part is written
    const int j = static_cast<int>(threadIdx.x);
    if (j < kValues && first_value + j < p.V)
      store_any(p.o.data, p.o.dtype, row_offset(p, p.o, run, 0) + first_value + j,
                sum_of<KeyRows<kK>>(s.parts, j));
  }

 private:
  int lane_, part_, key_, column_, keys_left_;
  float v_[8], b_[8], o_[kEach][8]{};
};

// A block's tile of a [V, K] state: per step, a thread has eight keys of two values. Where a thread
// of ValueRows has four keys, a thread here makes the sums of two neighbouring threads.
template <int kK>
class ShortValueRows {
  static constexpr int kLanes = ValueRows<kK>::kLanes / 2;
  static_assert(ValueRows<kK>::kRows == kChain);

 public:
  static constexpr int kValues = kShortValues<kK>, kEach = 2;
  static constexpr int kThreads = kValues / kEach * kLanes;

  struct Shared {
    uint4 state[kChain][kEach][kThreads];
    alignas(16) float q[kK], k[kK], a[kK];

    __device__ __forceinline__ void put(const Recurrence& p, int, int key, const KeyBits& x) {
      q[key] = p.scale * value_of(x.q, p.q.dtype);
      k[key] = value_of(x.k, p.k.dtype);
      a[key] = decay_of(value_of(x.gk, p.gk.dtype));
    }
  };

  __device__ __forceinline__ ShortValueRows(const Recurrence& p, int first_value) {
    key_ = static_cast<int>(threadIdx.x) % kLanes * 8;
    value_ = first_value + static_cast<int>(threadIdx.x) / kLanes;
#pragma unroll
    for (int j = 0; j < kEach; ++j) keys_left_[j] = value(j) < p.V ? p.K - key_ : 0;
  }
  __device__ __forceinline__ int start(const Recurrence& p, int) const {
    return value_ * p.K + key_;
  }
  __device__ __forceinline__ static int eight_bytes(const Recurrence& p) { return kFar * 2 * p.K; }
  __device__ __forceinline__ static int step_bytes(const Recurrence&) { return kLanes * 8 * 2; }
  __device__ __forceinline__ bool there(int step, int eight) const {
    return step * kLanes * 8 < keys_left_[eight];
  }

  __device__ __forceinline__ void load_token(const Recurrence& p, const Run& run, int, Shared& s) {
    TokenBits<kThreads, kK, 1> token;
    token.load_keys(p, run);
    ValueBits bits[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) bits[j] = ValueBits(p, run, 0, value(j));
    token.store_keys(p, s);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      v_[j] = value_of(bits[j].v, p.v.dtype);
      b_[j] = decay_of(value_of(bits[j].gv, p.gv.dtype));
    }
  }
  template <bool kValueGates>
  __device__ __forceinline__ void take_token(const Shared&) {}
  template <bool kValueGates, class State>
  __device__ __forceinline__ void move(const Shared& s, int step, Eight<State> (&S)[kEach]) {
    const int key = key_ + step * kLanes * 8;
    float q[8], k[8], a[8];
    load8_floats(q, &s.q[key]);
    load8_floats(k, &s.k[key]);
    load8_floats(a, &s.a[key]);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        x[c] = moved<kValueGates>(S[j][c], a[c], b_[j], k[c], v_[j]);
        o_[j][c / 4] = fmaf(q[c], x[c], o_[j][c / 4]);
      }
      pack8(S[j], x);
    }
  }
  __device__ __forceinline__ void store_outputs(const Recurrence& p, const Run& run, int, Shared&) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      float o = o_[j][0] + o_[j][1];
#pragma unroll
      for (int lane = 1; lane < kLanes; lane *= 2) o += __shfl_xor_sync(0xffffffffu, o, lane);
      if (key_ == 0 && value(j) < p.V)
        store_any(p.o.data, p.o.dtype, row_offset(p, p.o, run, 0) + value(j), o);
    }
  }

 private:
  static constexpr int kFar = kValues / kEach;  // distance of a thread's two values

  __device__ __forceinline__ int value(int j) const { return value_ + j * kFar; }

  int key_, value_, keys_left_[kEach];
  float v_[kEach], b_[kEach], o_[kEach][2]{};
};

// Blocks a multiprocessor, limited by their shared memory and registers.
template <class Tile>
constexpr int count_short_blocks() {
  int blocks = 1024 / Tile::kThreads;
  while (blocks > 1 && !fits_multiprocessor(blocks, sizeof(typename Tile::Shared))) --blocks;
  return blocks;
}

// The one token of a row, for one head.
__device__ __forceinline__ Run find_token(const Recurrence& p, unsigned index) {
  const unsigned n = index / static_cast<unsigned>(p.H);
  Run run{n, 0, 1, n, static_cast<int32_t>(index - n * static_cast<unsigned>(p.H))};
  if (p.slots.data != nullptr) {
    const int64_t slot = index_at(p.slots, n);
    run.state = slot < 0 || slot >= p.slots_in_pool ? -1 : slot;
  }
  return run;
}

template <class State, class Tile, bool kValueGates>
__global__ void __launch_bounds__(Tile::kThreads, count_short_blocks<Tile>())
    short_step_kernel(const __grid_constant__ Recurrence p) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const auto tiles = static_cast<unsigned>(blocks_of(p.V, Tile::kValues));
  const Run run = find_token(p, blockIdx.x / tiles);
  const int first_value = static_cast<int>(blockIdx.x % tiles) * Tile::kValues;
  if (run.state < 0) {
    for (int j = threadIdx.x; j < Tile::kValues && first_value + j < p.V; j += Tile::kThreads)
      store_any(p.o.data, p.o.dtype, row_offset(p, p.o, run, 0) + first_value + j, 0.f);
    return;
  }
  const int64_t matrix = run.state * p.state_stride_n + run.head * p.state_stride_h;
  const bool goes_on = p.has_initial == nullptr || p.has_initial[run.row];
  Tile tile(p, first_value);
  const int start = tile.start(p, first_value);
  const auto* from =
      reinterpret_cast<const char*>(static_cast<const State*>(p.state_in) + (matrix + start));
#pragma unroll
  for (int step = 0; step < kChain; ++step, from += Tile::step_bytes(p)) {
#pragma unroll
    for (int j = 0; j < Tile::kEach; ++j)
      sm90::copy16(sm90::shared_address(&s.state[step][j][threadIdx.x]),
                   from + j * Tile::eight_bytes(p), goes_on && tile.there(step, j));
    sm90::commit_copies();
  }
  const int64_t to_matrix = p.state_out == nullptr ? -1 : written_matrix(p, run.row, run, matrix);
  auto* to = reinterpret_cast<char*>(static_cast<State*>(p.state_out) + (to_matrix + start));
  tile.load_token(p, run, first_value, s);
  __syncthreads();  // the token is written
  tile.template take_token<kValueGates>(s);
#pragma unroll(kShortSteps<kValueGates>)
  for (int step = 0; step < kChain; ++step, to += Tile::step_bytes(p)) {
    // Each step commits an empty group, so that waiting for all but the newest kChain groups waits
    // for this step's copies.
    sm90::commit_copies();
    sm90::wait_for_copies<kChain>();
    Eight<State> S[Tile::kEach];
#pragma unroll
    for (int j = 0; j < Tile::kEach; ++j)
      *reinterpret_cast<uint4*>(S[j].words) = s.state[step][j][threadIdx.x];
    tile.template move<kValueGates>(s, step, S);
#pragma unroll
    for (int j = 0; j < Tile::kEach; ++j)
      if (to_matrix >= 0 && tile.there(step, j))
        __stcs(reinterpret_cast<uint4*>(to + j * Tile::eight_bytes(p)),
               *reinterpret_cast<const uint4*>(S[j].words));
  }
  tile.store_outputs(p, run, first_value, s);
}

// Whether every row has one token, and every row of its state consists of eights.
inline bool takes_short_step(const Recurrence& p) {
  const int64_t columns = p.state_v_first ? p.K : p.V;
  return p.T == 1 && p.cu_seqlens.data == nullptr && p.accepted.data == nullptr &&
         p.q.data != nullptr && p.least_tokens <= 1 && p.most_tokens >= 1 && p.state_aligned &&
         columns % 8 == 0 && p.state_stride_n % 8 == 0 && p.state_stride_h % 8 == 0;
}

template <class State, class Tile, bool kValueGates>
void launch_short_step(const Recurrence& p, cudaStream_t stream) {
  constexpr auto kernel = short_step_kernel<State, Tile, kValueGates>;
  constexpr size_t kBytes = sizeof(typename Tile::Shared);
  static_assert(kBytes <= kSharedOfEveryGpu);
  static const DynamicShared shared(kernel, kBytes);
  shared.allow();
  const int64_t blocks = count_runs(p) * blocks_of(p.V, Tile::kValues);
  kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, kBytes, stream>>>(p);
}

template <class State, class Tile>
void launch_short_step(const Recurrence& p, cudaStream_t stream) {
  if (p.gv.data != nullptr)
    launch_short_step<State, Tile, true>(p, stream);
  else
    launch_short_step<State, Tile, false>(p, stream);
}

// The launch for pools of 16-bit states.
template <class State>
void launch_on_short_states(const Recurrence& p, cudaStream_t stream) {
  if (!takes_short_step(p)) return launch_forward<State>(p, stream);
  with_keys(p.K, [&](auto keys) {
    constexpr int kK = decltype(keys)::value;
    if (p.state_v_first)
      launch_short_step<State, ShortValueRows<kK>>(p, stream);
    else
      launch_short_step<State, ShortKeyRows<kK>>(p, stream);
  });
}

}  // namespace recurrent
}  // namespace gla_ext::cuda
