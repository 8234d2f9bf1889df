// A token step on a pool, with the gate computed from its low-rank projection:
//   z = W h + b      gk = max(logsigmoid(z) / τ, c)      S = exp gk ⊙ S + k vᵀ      o = scale Sᵀ q
//
// grid    as in forward.cu: a block has all keys of kValues values of a row's head, and makes the
//         gates of that head
// reads   h [B, R], W [HK K, R], b [HK K], q, k [B, 1, H, K], v [B, 1, H, V], state
// writes  o [B, 1, H, V], state
// gk is rounded to the inputs' dtype, as by the separate operator. State and W are read before the
// previous kernel ends.
#include <type_traits>

#include "cuda/device/capability.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "state_rows.cuh"

namespace gla_ext::cuda {
namespace recurrent {
namespace {

template <class T>
__device__ __forceinline__ float dot(const Eight<T>& a, const Eight<T>& b, float sum) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// The inputs for the gates of this thread's keys: rows of W, loaded early, and h.
template <class Tile, int kK, class T>
class Gates {
 public:
  __device__ __forceinline__ Gates(const Recurrence& p, const LowRankGate& gate, const Run& run) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool there = key(i) < p.K;
      bias_[i] = from_float<T>(0.f);
      if (there && gate.bias.data != nullptr)
        bias_[i] = static_cast<const T*>(gate.bias.data)[head_offset(gate.bias, run.head) + key(i)];
#pragma unroll
      for (int j = 0; j < kEarly; ++j)
        w_[i][j] = load8<Access::kFast>(row(gate, run, key(i)) + 8 * j, there && 8 * j < gate.rank);
    }
  }
  // Loads h, which the previous kernel writes.
  __device__ __forceinline__ void load_h(const LowRankGate& gate, const Run& run) {
    h_ = static_cast<const T*>(gate.h) + run.row * gate.h_stride;
#pragma unroll
    for (int j = 0; j < kEarly; ++j) {
      first_h_[j].clear();
      if (8 * j < gate.rank) first_h_[j] = load8_aligned(h_ + 8 * j);
    }
  }
  __device__ __forceinline__ void store(const Recurrence& p, const LowRankGate& gate,
                                        const Run& run, float* decays) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (key(i) >= p.K) continue;
      float z = to_float(bias_[i]);
#pragma unroll
      for (int j = 0; j < kEarly; ++j) z = dot(w_[i][j], first_h_[j], z);
      for (int r = 8 * kEarly; r < gate.rank; r += 8)
        z = dot(load8_aligned(row(gate, run, key(i)) + r), load8_aligned(h_ + r), z);
      const float g = (fminf(z, 0.f) - log1pf(expf(-fabsf(z)))) * gate.per_normalizer;
      decays[key(i)] = decay_of(to_float(from_float<T>(g < gate.clamp_min ? gate.clamp_min : g)));
    }
  }

 private:
  static constexpr int kEach = kK <= Tile::kThreads ? 1 : kK / Tile::kThreads;
  // Times 8 ranks, whose weights are loaded early. From compute capability 10.0 on, registers would
  // spill with two of them beside the state of ValueRows.
  static constexpr int kEarly = kMajor >= 10 && std::is_same_v<Tile, ValueRows<kK>> ? 1 : 2;

  __device__ __forceinline__ static int key(int i) {
    return i * Tile::kThreads + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ static const T* row(const LowRankGate& gate, const Run& run, int key) {
    return static_cast<const T*>(gate.weight.data) + head_offset(gate.weight, run.head) +
           int64_t{key} * gate.rank;
  }

  T bias_[kEach];
  Eight<T> w_[kEach][kEarly], first_h_[kEarly];
  const T* h_;
};

template <class Tile, int kK, Access kAccess, class T>
__global__ void __launch_bounds__(Tile::kThreads, 512 / Tile::kThreads)
    low_rank_step_kernel(const __grid_constant__ Recurrence p,
                         const __grid_constant__ LowRankGate gate) {
  __shared__ __align__(16) Stage<Tile, kK, false, 1> s;
  const int value_blocks = blocks_of(p.V, Tile::kValues);
  sm90::release_next_kernel();
  const Run run = find_run(p, blockIdx.x / value_blocks);
  const int first_value = static_cast<int>(blockIdx.x % value_blocks) * Tile::kValues;
  if (run.state < 0) {
    sm90::await_previous_kernel();
    store_outputs<Tile, kK>(p, run, 0, 1, first_value, [](int, int) { return 0.f; });
    return;
  }
  const int64_t matrix = run.state * p.state_stride_n + run.head * p.state_stride_h;
  Gates<Tile, kK, T> gates(p, gate, run);
  Tile tile;
  load_state<float, Tile, kAccess>(p, state_at<float>(p, matrix), first_value, tile);
  sm90::await_previous_kernel();
  gates.load_h(gate, run);
  const TokenBits<Tile::kThreads, kK, Tile::kValues> token(p, run, first_value);
  token.store(p, s.tokens);
  gates.store(p, gate, run, s.tokens.a[0]);
  s.run(p, run, 0, 1, first_value, tile);
  store_state<float, Tile, kAccess>(p, matrix, first_value, tile);
}

template <class Tile, int kK, Access kAccess, class T>
void launch_step(const Recurrence& p, const LowRankGate& gate, cudaStream_t stream) {
  const auto kernel = low_rank_step_kernel<Tile, kK, kAccess, T>;
  const int64_t blocks = count_runs(p) * blocks_of(p.V, Tile::kValues);
  if (gate.overlaps)
    sm90::launch_dependent(kernel, blocks, Tile::kThreads, 0, stream, p, gate);
  else
    kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, 0, stream>>>(p, gate);
}

template <class Tile, int kK>
void launch_step(const Recurrence& p, const LowRankGate& gate, cudaStream_t stream) {
  const auto with = [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.state_aligned)
      launch_step<Tile, kK, Access::kFast, T>(p, gate, stream);
    else
      launch_step<Tile, kK, Access::kGeneral, T>(p, gate, stream);
  };
  if (p.q.dtype == DType::kBFloat16) return with(Type<bf16>{});
  with(Type<half>{});
}

}  // namespace
}  // namespace recurrent

void recurrent_low_rank_step(const Recurrence& p, const LowRankGate& gate, cudaStream_t stream) {
  if (count_runs(p) == 0) return;
  with_keys(p.K, [&](auto keys) {
    constexpr int kK = decltype(keys)::value;
    if (p.state_v_first)
      recurrent::launch_step<recurrent::ValueRows<kK>, kK>(p, gate, stream);
    else
      recurrent::launch_step<recurrent::KeyRows<kK>, kK>(p, gate, stream);
  });
}

}  // namespace gla_ext::cuda
