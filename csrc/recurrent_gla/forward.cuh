// The recurrence, for the state types of forward.cu, forward_bf16.cu and forward_fp16.cu: S_t = a_t
// ⊙ S_{t-1} ⊙ b_t + k_t v_tᵀ, o_t = scale S_tᵀ q_t, a = exp gk, b = exp gv.
//
// grid    (sequence or row of a pool, head, kValues values); all keys of these values stay in
//         registers. The state is read once and written once, four numbers at a time if rows are
//         aligned
// reads   q, k, gk [B, T, H, K], v, gv [B, T, H, V], state_in [.., H, K, V] or v-first
// writes  o [B, T, H, V], state_out
// Everything is accumulated in fp32. The order of the sum over keys depends only on K and the
// layout of the state, so a sequence has the same bits in any batch and any pool.
#pragma once

#include "cuda/device/launch.cuh"
#include "state_rows.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// Blocks a multiprocessor, as many as registers allow. 16-bit states need additional registers
// while they are loaded.
template <class State, class Tile, int kK, Access kAccess, bool kOneToken>
constexpr int count_blocks() {
  constexpr bool kShort = sizeof(State) == 2;
  if (kShort && (kAccess == Access::kGeneral || kK > 256)) return 1;
  return (kAccess == Access::kFast && kOneToken ? Tile::kResident : 512) / Tile::kThreads;
}

// Where the final state is written: to the initial state's place, or to its write slot; -1:
// nowhere.
__device__ __forceinline__ int64_t written_matrix(const Recurrence& p, int64_t n, const Run& run,
                                                  int64_t matrix) {
  if (p.write_slots.data == nullptr) return matrix;
  const int64_t slot = index_at(p.write_slots, n);
  if (slot < 0 || slot >= p.slots_in_pool) return -1;
  return slot * p.state_stride_n + run.head * p.state_stride_h;
}

// kOneToken: T = 1, or sequences of at most one token. The token is then loaded at the same time as
// the state.
template <class State, class Tile, int kK, Access kAccess, bool kValueGates, bool kOneToken>
__global__ void __launch_bounds__(Tile::kThreads,
                                  (count_blocks<State, Tile, kK, kAccess, kOneToken>()))
    forward_kernel(Recurrence p) {
  constexpr int kTokens = kOneToken ? 1 : kStageTokens<kK>;
  __shared__ __align__(16) Stage<Tile, kK, kValueGates, kTokens> s;
  const int value_blocks = blocks_of(p.V, Tile::kValues);
  const Run run = find_run(p, blockIdx.x / value_blocks);
  const int first_value = static_cast<int>(blockIdx.x % value_blocks) * Tile::kValues;
  if (run.length < p.least_tokens || run.length > p.most_tokens) return;
  if (run.state < 0) {
    if (p.o.data != nullptr)
      for (int64_t t = 0; t < run.length; ++t)
        store_outputs<Tile, kK>(p, run, t, 1, first_value, [](int, int) { return 0.f; });
    return;
  }
  const int64_t n = blockIdx.x / value_blocks / p.H;
  const bool goes_on = p.has_initial == nullptr || p.has_initial[n];
  if (run.length == 0 && goes_on && p.state_out == p.state_in && p.write_slots.data == nullptr)
    return;
  const int64_t matrix = run.state * p.state_stride_n + run.head * p.state_stride_h;
  const State* from = goes_on ? state_at<State>(p, matrix) : nullptr;
  Tile tile;
  if constexpr (kOneToken) {
    static_assert(sizeof(State) == 4);  // shorter numbers would have to be unpacked
    if (run.length == 0) {
      load_state<State, Tile, kAccess>(p, from, first_value, tile);
    } else {
      const TokenBits<Tile::kThreads, kK, Tile::kValues> token(p, run, first_value);
      load_state<State, Tile, kAccess>(p, from, first_value, tile);
      token.store(p, s.tokens);
      s.run(p, run, 0, static_cast<int>(run.length), first_value, tile);
    }
  } else {
    load_state<State, Tile, kAccess>(p, from, first_value, tile);
    unpack_state<State, Tile, kAccess>(p, first_value, tile);
    for (int64_t first = 0; first < run.length; first += kTokens) {
      const int64_t left = run.length - first;
      const int count = static_cast<int>(left < kTokens ? left : kTokens);
      if (first > 0) __syncthreads();  // the previous tokens and o are read
      s.tokens.template load<Tile::kThreads>(p, run, first, count, first_value);
      s.run(p, run, first, count, first_value, tile);
    }
  }
  if (p.state_out == nullptr) return;
  const int64_t to = written_matrix(p, n, run, matrix);
  if (to >= 0) store_state<State, Tile, kAccess>(p, to, first_value, tile);
}

template <class State, class Tile, int kK, Access kAccess, bool kValueGates>
void launch_forward(const Recurrence& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(count_runs(p) * blocks_of(p.V, Tile::kValues));
  if constexpr (sizeof(State) == 4) {
    if (p.T == 1 || p.most_tokens <= 1) {
      forward_kernel<State, Tile, kK, kAccess, kValueGates, true>
          <<<blocks, Tile::kThreads, 0, stream>>>(p);
      return;
    }
  }
  forward_kernel<State, Tile, kK, kAccess, kValueGates, false>
      <<<blocks, Tile::kThreads, 0, stream>>>(p);
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
  if (p.state_aligned)
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
