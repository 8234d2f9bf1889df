// The recurrence, on states of a type that forward.cu and its sisters name: S_t = a_t ⊙ S_{t-1} ⊙
// b_t + k_t v_tᵀ, o_t = scale S_tᵀ q_t, a = exp gk, b = exp gv.
//
// grid    (sequence or row of a pool, head, kValues values); all keys of these stay in registers,
//         read once and written once, four numbers at a time where rows allow it. One token on
//         states in 16 bits: some times kValues values, one after the other
// reads   q, k, gk [B, T, H, K], v, gv [B, T, H, V], state_in [.., H, K, V] or v-first
// writes  o [B, T, H, V], state_out
// Everything is accumulated in fp32. The order of the sum over keys depends on K and the layout of
// the state alone, so a sequence has the same bits in any batch and any pool.
#pragma once

#include "cuda/device/launch.cuh"
#include "run.cuh"

namespace gla_ext::cuda {
namespace recurrent {

template <int kK>
constexpr int kValues = kTileElements / kK;  // of a block
// Tokens in shared memory at a time, so that four blocks fit on a multiprocessor.
template <int kK>
constexpr int kStageTokens = kK == 128 || kK == 256 ? 8 : 4;

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
// is a sum over threads of several warps.
template <int kK>
struct KeyRows {
  static constexpr int kThreads = 256, kRows = kTileElements / kThreads / 4;
  static constexpr int kFours = kValues<kK> / 4, kGroups = kThreads / kFours;
  static constexpr int kSums = kThreads / 32;  // that make up an o
  static constexpr int kBlocks = 4;            // of a multiprocessor, as many as registers allow
  float S[kRows][4];

  __device__ __forceinline__ static int value() { return threadIdx.x % kFours * 4; }
  __device__ __forceinline__ static int key(int i) {
    return i * kGroups + static_cast<int>(threadIdx.x) / kFours;
  }
  // f(the four numbers, their offset in the matrix, how many of them are there)
  template <Access kAccess, class F>
  __device__ __forceinline__ void for_fours(const Recurrence& p, int first_value, F&& f) {
    const int v = first_value + value();
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      f(S[i], key(i) * p.V + v, kAccess == Access::kFast || key(i) < p.K ? p.V - v : 0);
  }
  // Token t, whose v and gate stand in row `row`.
  template <bool kValueGates, class Tokens>
  __device__ __forceinline__ void step(const Tokens& s, int t, int row, float (*s_o)[kValues<kK>]) {
    const float4 v = *reinterpret_cast<const float4*>(&s.v[row][value()]);
    const float4 b = *reinterpret_cast<const float4*>(&s.b[row][value()]);
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

// A block's tile of a [V, K] state: a thread has keys of one value, in fours. A token's o is a sum
// over neighbouring lanes.
template <int kK>
struct ValueRows {
  static constexpr int kThreads = 256, kRows = kTileElements / kThreads / 4;
  static constexpr int kLanes = kThreads / kValues<kK>, kSums = 1, kBlocks = 2;
  float S[kRows][4];

  __device__ __forceinline__ static int value() { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ __forceinline__ static int key(int i) {
    return (i * kLanes + static_cast<int>(threadIdx.x) % kLanes) * 4;
  }
  template <Access kAccess, class F>
  __device__ __forceinline__ void for_fours(const Recurrence& p, int first_value, F&& f) {
    const int v = first_value + value(), K = kAccess == Access::kFast ? kK : p.K;
#pragma unroll
    for (int i = 0; i < kRows; ++i) f(S[i], v * K + key(i), v < p.V ? K - key(i) : 0);
  }
  template <bool kValueGates, class Tokens>
  __device__ __forceinline__ void step(const Tokens& s, int t, int row, float (*s_o)[kValues<kK>]) {
    const float v = s.v[row][value()], b = s.b[row][value()];
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
  for (int i = threadIdx.x; i < count * kValues<kK>; i += Tile::kThreads) {
    const int t = i / kValues<kK>, j = i % kValues<kK>, value = first_value + j;
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
  Operands<kTokens, kK, kValues<kK>, false> tokens;
  alignas(16) float o[kTokens][Tile::kSums][kValues<kK>];

  // The next `count` tokens, which are in `tokens`.
  __device__ __forceinline__ void run(const Recurrence& p, const Run& run, int64_t first, int count,
                                      int first_value, Tile& tile) {
    __syncthreads();  // the tokens are written
#pragma unroll 1
    for (int t = 0; t < count; ++t) tile.template step<kValueGates>(tokens, t, t, o[t]);
    if (p.o.data == nullptr) return;
    __syncthreads();  // o of every warp is written
    store_outputs<Tile, kK>(p, run, first, count, first_value,
                            [&](int t, int j) { return sum_of<Tile>(o[t], j); });
  }
};

// Blocks of a multiprocessor, as many as registers allow: short numbers take some on their way.
template <class State, class Tile, int kK, Access kAccess, bool kValueGates, bool kOneToken>
constexpr int count_blocks() {
  constexpr bool kShort = sizeof(State) == 2;
  if (kAccess == Access::kGeneral) return kShort ? 1 : 2;
  if (!kOneToken) return kShort && kK > 256 ? 1 : 2;
  if (!kShort) return Tile::kBlocks;
  return (Tile::kBlocks < 4 ? 3 : 4) - (kK > 256 || (kValueGates && Tile::kBlocks == 4));
}

// Where the state goes: back, or to a slot of its own; -1: nowhere.
__device__ __forceinline__ int64_t written_matrix(const Recurrence& p, int64_t index,
                                                  const Run& run, int64_t matrix) {
  if (p.write_slots.data == nullptr) return matrix;
  const int64_t slot = index_at(p.write_slots, index / p.H);
  if (slot < 0 || slot >= p.slots_in_pool) return -1;
  return slot * p.state_stride_n + run.head * p.state_stride_h;
}

template <class State, class Tile, Access kAccess>
__device__ __forceinline__ void load_state(const Recurrence& p, int64_t matrix, int first_value,
                                           Tile& tile) {
  tile.template for_fours<kAccess>(p, first_value, [&](float (&x)[4], int offset, int valid) {
    load4<kAccess>(x, static_cast<const State*>(p.state_in) + matrix + offset,
                   p.state_in != nullptr ? valid : 0);
  });
}
template <class State, class Tile, Access kAccess>
__device__ __forceinline__ void unpack_state(const Recurrence& p, int first_value, Tile& tile) {
  tile.template for_fours<kAccess>(p, first_value,
                                   [&](float (&x)[4], int, int) { unpack4<kAccess, State>(x); });
}
template <class State, class Tile, Access kAccess>
__device__ __forceinline__ void store_state(const Recurrence& p, int64_t matrix, int first_value,
                                            Tile& tile) {
  tile.template for_fours<kAccess>(p, first_value, [&](float (&x)[4], int offset, int valid) {
    store4<kAccess>(static_cast<State*>(p.state_out) + matrix + offset, x, valid);
  });
}

// One token, some tiles of values one after the other. Keys and gates are loaded once: with states
// of half the bytes, what a block computes before its first tile would take as long as the tile.
template <class Tile, int kK>
struct Tiles {
  Operands<1, kK, kValues<kK>, false, 2> tokens;
  alignas(16) float o[2][Tile::kSums][kValues<kK>];

  template <class State, Access kAccess, bool kValueGates>
  __device__ __forceinline__ void run(const Recurrence& p, const Run& run, int64_t from, int64_t to,
                                      int first_tile, int end_tile) {
#pragma unroll 1
    for (int i = first_tile; i < end_tile; ++i) {
      const int first_value = i * kValues<kK>, stage = (i - first_tile) % 2;
      TokenBits<Tile::kThreads, kK, kValues<kK>> token;
      Tile tile;
      if (run.length > 0) {
        if (i == first_tile) token.load_keys(p, run);
        token.load_values(p, run, first_value);
      }
      load_state<State, Tile, kAccess>(p, from, first_value, tile);
      if (run.length > 0) {
        if (i == first_tile) token.store_keys(p, tokens);
        token.store_values(p, tokens, stage);
      }
      unpack_state<State, Tile, kAccess>(p, first_value, tile);
      if (run.length > 0) {
        __syncthreads();  // the token is written, and every warp is done with the last tile but one
        tile.template step<kValueGates>(tokens, 0, stage, o[stage]);
        if (p.o.data != nullptr) {
          __syncthreads();  // o of every warp is written
          store_outputs<Tile, kK>(p, run, 0, 1, first_value,
                                  [&](int, int j) { return sum_of<Tile>(o[stage], j); });
        }
      }
      if (to >= 0) store_state<State, Tile, kAccess>(p, to, first_value, tile);
    }
  }
};

// kOneToken: T = 1. The token is loaded while the state is.
template <class State, class Tile, int kK, Access kAccess, bool kValueGates, bool kOneToken>
__global__ void __launch_bounds__(
    Tile::kThreads, (count_blocks<State, Tile, kK, kAccess, kValueGates, kOneToken>()))
    forward_kernel(Recurrence p) {
  constexpr bool kInTiles = kOneToken && sizeof(State) == 2;
  constexpr int kTokens = kOneToken ? 1 : kStageTokens<kK>;
  using Shared =
      std::conditional_t<kInTiles, Tiles<Tile, kK>, Stage<Tile, kK, kValueGates, kTokens>>;
  __shared__ __align__(16) Shared s;
  const int tiles = blocks_of(p.V, kValues<kK>), each = kInTiles ? p.tiles_of_block : 1;
  const int value_blocks = kInTiles ? blocks_of(tiles, each) : tiles;
  const Run run = find_run(p, blockIdx.x / value_blocks);
  const int first_tile = static_cast<int>(blockIdx.x % value_blocks) * each;
  const int first_value = first_tile * kValues<kK>;
  if (run.length < p.least_tokens) return;
  if (run.state < 0) {
    if (p.o.data != nullptr)
      for (int i = 0; i < each; ++i)
        for (int64_t t = 0; t < run.length; ++t)
          store_outputs<Tile, kK>(p, run, t, 1, first_value + i * kValues<kK>,
                                  [](int, int) { return 0.f; });
    return;
  }
  if (run.length == 0 && p.state_out == p.state_in && p.write_slots.data == nullptr) return;
  const int64_t matrix = run.state * p.state_stride_n + run.head * p.state_stride_h;
  if constexpr (kInTiles) {
    const int64_t index = blockIdx.x / value_blocks;
    const int64_t to = p.state_out == nullptr ? -1 : written_matrix(p, index, run, matrix);
    const int end_tile = first_tile + each < tiles ? first_tile + each : tiles;
    s.template run<State, kAccess, kValueGates>(p, run, matrix, to, first_tile, end_tile);
    return;
  } else {
    Tile tile;
    if constexpr (kOneToken) {
      if (run.length == 0) {
        load_state<State, Tile, kAccess>(p, matrix, first_value, tile);
      } else {
        const TokenBits<Tile::kThreads, kK, kValues<kK>> token(p, run, first_value);
        load_state<State, Tile, kAccess>(p, matrix, first_value, tile);
        token.store(p, s.tokens);
        s.run(p, run, 0, static_cast<int>(run.length), first_value, tile);
      }
    } else {
      load_state<State, Tile, kAccess>(p, matrix, first_value, tile);
      unpack_state<State, Tile, kAccess>(p, first_value, tile);
      for (int64_t first = 0; first < run.length; first += kTokens) {
        const int64_t left = run.length - first;
        const int count = static_cast<int>(left < kTokens ? left : kTokens);
        if (first > 0) __syncthreads();  // the tokens and the o before are read
        s.tokens.template load<Tile::kThreads>(p, run, first, count, first_value);
        s.run(p, run, first, count, first_value, tile);
      }
    }
    if (p.state_out == nullptr) return;
    const int64_t to = written_matrix(p, blockIdx.x / value_blocks, run, matrix);
    if (to >= 0) store_state<State, Tile, kAccess>(p, to, first_value, tile);
  }
}

template <class State, class Tile, int kK, Access kAccess, bool kValueGates>
void launch_forward(const Recurrence& given, cudaStream_t stream) {
  const int64_t runs = count_runs(given);
  const int tiles = blocks_of(given.V, kValues<kK>);
  const auto launch = [&](auto one_token, const Recurrence& p) {
    constexpr bool kOneToken = decltype(one_token)::value;
    const auto blocks = static_cast<unsigned>(runs * blocks_of(tiles, p.tiles_of_block));
    forward_kernel<State, Tile, kK, kAccess, kValueGates, kOneToken>
        <<<blocks, Tile::kThreads, 0, stream>>>(p);
  };
  if (given.T != 1) return launch(std::false_type{}, given);
  Recurrence p = given;
  if (sizeof(State) == 2) {
    constexpr int kAtOnce = count_blocks<State, Tile, kK, kAccess, kValueGates, true>();
    p.tiles_of_block = choose_tiles(runs, tiles, int64_t{kAtOnce} * p.multiprocessors, 1);
  }
  launch(std::true_type{}, p);
}

template <class State, class Tile, int kK, Access kAccess>
void launch_forward(const Recurrence& p, cudaStream_t stream) {
  if (p.gv.data != nullptr)
    launch_forward<State, Tile, kK, kAccess, true>(p, stream);
  else
    launch_forward<State, Tile, kK, kAccess, false>(p, stream);
}

template <class State, class Tile, int kK>
void launch_forward(const Recurrence& p, cudaStream_t stream) {
  if (p.state_aligned && p.K == kK)
    launch_forward<State, Tile, kK, Access::kFast>(p, stream);
  else
    launch_forward<State, Tile, kK, Access::kGeneral>(p, stream);
}

template <class State>
void launch_forward(const Recurrence& p, cudaStream_t stream) {
  with_keys(p.K, [&](auto keys) {
    constexpr int kK = decltype(keys)::value;
    if (p.state_v_first)
      launch_forward<State, ValueRows<kK>, kK>(p, stream);
    else
      launch_forward<State, KeyRows<kK>, kK>(p, stream);
  });
}

}  // namespace recurrent
}  // namespace gla_ext::cuda
