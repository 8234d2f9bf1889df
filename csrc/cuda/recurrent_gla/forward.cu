// The recurrence: S_t = a_t ⊙ S_{t-1} ⊙ b_t + k_t v_tᵀ, o_t = scale S_tᵀ q_t, a = exp gk, b = exp
// gv.
//
// grid    (sequence or row of a pool, head, kValues values); all keys of these stay in registers,
//         read once and written once, 16 bytes at a time where rows allow it
// reads   q, k, gk [B, T, H, K], v, gv [B, T, H, V], state_in [.., H, K, V] or v-first
// writes  o [B, T, H, V], state_out
// Everything is accumulated in fp32. The order of the sum over keys depends on K and the layout of
// the state alone, so a sequence has the same bits in any batch and any pool.
#include "cuda/device/launch.cuh"
#include "state_rows.cuh"

namespace gla_ext::cuda {
namespace {

template <class Tile, Access kAccess, bool kOneToken>
constexpr int kBlocks =
    kOneToken && kAccess == Access::kFast ? Tile::kBlocks : 512 / Tile::kThreads;  // of an SM

// kOneToken: T = 1. The token is loaded while the state is.
template <class Tile, int kK, Access kAccess, bool kValueGates, bool kOneToken>
__global__ void __launch_bounds__(Tile::kThreads, (kBlocks<Tile, kAccess, kOneToken>))
    forward_kernel(Recurrence p) {
  constexpr int kTokens = kOneToken ? 1 : kStageTokens<kK>;
  __shared__ __align__(16) Stage<Tile, kK, kValueGates, kTokens> s;
  const int value_blocks = blocks_of(p.V, kValues<kK>);
  const Run run = find_run(p, blockIdx.x / value_blocks);
  const int first_value = static_cast<int>(blockIdx.x % value_blocks) * kValues<kK>;
  if (run.state < 0) {
    if (p.o.data != nullptr)
      for (int64_t t = 0; t < run.length; ++t)
        store_outputs<Tile, kK>(p, run, t, 1, first_value, [](int, int) { return 0.f; });
    return;
  }
  if (run.length == 0 && p.state_out == p.state_in) return;
  const int64_t matrix = run.state * p.state_stride_n + run.head * p.state_stride_h;
  Tile tile;
  const auto load_state = [&] {
    tile.template for_fours<kAccess>(p, first_value, [&](float (&x)[4], int offset, int valid) {
      load4<kAccess>(x, p.state_in + matrix + offset, p.state_in != nullptr ? valid : 0);
    });
  };
  if constexpr (kOneToken) {
    if (run.length == 0) {
      load_state();
    } else {
      const TokenBits<Tile::kThreads, kK, kValues<kK>> token(p, run, first_value);
      load_state();
      token.store(p, s.tokens);
      s.run(p, run, 0, static_cast<int>(run.length), first_value, tile);
    }
  } else {
    load_state();
    for (int64_t first = 0; first < run.length; first += kTokens) {
      const int64_t left = run.length - first;
      const int count = static_cast<int>(left < kTokens ? left : kTokens);
      if (first > 0) __syncthreads();  // the tokens and the o before are read
      s.tokens.template load<Tile::kThreads>(p, run, first, count, first_value);
      s.run(p, run, first, count, first_value, tile);
    }
  }
  if (p.state_out != nullptr)
    tile.template for_fours<kAccess>(p, first_value, [&](float (&x)[4], int offset, int valid) {
      store4<kAccess>(p.state_out + matrix + offset, x, valid);
    });
}

template <class Tile, int kK, Access kAccess, bool kValueGates>
void launch_forward(const Recurrence& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(count_runs(p) * blocks_of(p.V, kValues<kK>));
  if (p.T == 1)
    forward_kernel<Tile, kK, kAccess, kValueGates, true><<<blocks, Tile::kThreads, 0, stream>>>(p);
  else
    forward_kernel<Tile, kK, kAccess, kValueGates, false><<<blocks, Tile::kThreads, 0, stream>>>(p);
}

template <class Tile, int kK, Access kAccess>
void launch_forward(const Recurrence& p, cudaStream_t stream) {
  if (p.gv.data != nullptr)
    launch_forward<Tile, kK, kAccess, true>(p, stream);
  else
    launch_forward<Tile, kK, kAccess, false>(p, stream);
}

template <class Tile, int kK>
void launch_forward(const Recurrence& p, cudaStream_t stream) {
  if (p.state_aligned && p.K == kK)
    launch_forward<Tile, kK, Access::kFast>(p, stream);
  else
    launch_forward<Tile, kK, Access::kGeneral>(p, stream);
}

}  // namespace

void recurrent_forward(const Recurrence& p, cudaStream_t stream) {
  if (count_runs(p) == 0) return;
  with_keys(p.K, [&](auto keys) {
    constexpr int kK = decltype(keys)::value;
    if (p.state_v_first)
      launch_forward<ValueRows<kK>, kK>(p, stream);
    else
      launch_forward<KeyRows<kK>, kK>(p, stream);
  });
}

}  // namespace gla_ext::cuda
