// The recurrence's gradients, last token first, with P_t = a_t ⊙ S_{t-1} ⊙ b_t and dS that of S_t:
//   dS += scale q_t do_tᵀ     dq_t = scale S_t do_t     dk_t = dS v_t     dv_t = dSᵀ k_t
//   dgk_t = rowsum(P_t ⊙ dS)  dgv_t = colsum(P_t ⊙ dS)  dS = a_t ⊙ dS ⊙ b_t
//
// grid    as many blocks as are resident; each has some of the (sequence, head, kValues values)
// reads   q, k, gk [B, T, H, K], v, gv, do [B, T, H, V], state_in, dht [N, H, K, V] or v-first
// writes  dq, dk, dgk [B, T, H, K], dv, dgv [B, T, H, V], dh0
// S_{t-1} is recomputed from states that are kept in memory every kKeptTokens tokens, and between
// those every kReplayTokens. So nothing is divided by a decay, and no two terms of a gate's
// gradient cancel. Sums over the values of several blocks are stored as partial sums, which
// sum_partials adds in order. Everything is fp32, in an order that depends only on K and V.
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "tile.cuh"

namespace gla_ext::cuda {
namespace {

enum KeyGrad { kDq, kDk, kDgk, kKeyGrads };
enum ValueGrad { kDv, kDgv, kValueGrads };

template <int kK>
struct Layout {
  // In a warp, lane / kValueLanes selects the keys and lane % kValueLanes the values.
  static constexpr int kValueLanes = kK > 512 ? 2 : 4;
  static constexpr int kWarpKeys = 32 / kValueLanes * kThreadKeys;
  static constexpr int kWarpValues = kValueLanes * kThreadValues;
  static constexpr int kKeyWarps = kK / kWarpKeys;
  static constexpr int kValueWarps = kBlockThreads / 32 / kKeyWarps;
  static constexpr int kValues = kWarpValues * kValueWarps;
  static constexpr int kStageTokens = kK <= 256 ? 8 : 4;
  static_assert(kK * kValues == kTileElements, "every thread has as many elements");

  Operands<kStageTokens, kK, kValues, true> tokens;
  // Each warp's sums for the tokens of a replay.
  float keys[kReplayTokens][kKeyGrads][kValueWarps][kK];
  float values[kReplayTokens][kValueGrads][kKeyWarps][kValues];
};

template <int kK>
class Backward {
 public:
  using L = Layout<kK>;

  __device__ __forceinline__ Backward(const Recurrence& p, const RecurrentBackwardPlan& plan, L& s)
      : p_(p), plan_(plan), s_(s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    key_warp_ = warp % L::kKeyWarps, value_warp_ = warp / L::kKeyWarps;
    key_ = key_warp_ * L::kWarpKeys + lane / L::kValueLanes * kThreadKeys;
    value_ = value_warp_ * L::kWarpValues + lane % L::kValueLanes * kThreadValues;
  }

  __device__ __forceinline__ void run(int64_t item) {
    value_block_ = static_cast<int>(item % plan_.value_blocks);
    run_ = find_run(p_, item / plan_.value_blocks);
    if (run_.state < 0) return zeros();
    keep_states();
    Tile dS;
    load_matrix(dS, p_.dht);
    for (int64_t part = parts() - 1; part >= 0; --part) {
      const int64_t first = part * kKeptTokens, left = run_.length - first;
      const int count = static_cast<int>(left < kKeptTokens ? left : kKeptTokens);
      replay(part, first, count);
      gradients(first, count, dS);
    }
    if (p_.dh0 != nullptr) store_matrix(dS);
  }

 private:
  __device__ __forceinline__ int64_t parts() const {
    return (run_.length + kKeptTokens - 1) / kKeptTokens;
  }

  // The kept state at the start of part `part` > 0 of the sequence.
  __device__ __forceinline__ float* kept(int64_t part) const {
    const int64_t before = p_.cu_seqlens.data != nullptr ? run_.start / kKeptTokens
                                                         : run_.row * ((p_.T - 1) / kKeptTokens);
    return p_.kept +
           (((before + part - 1) * p_.H + run_.head) * plan_.value_blocks + value_block_) *
               kTileElements;
  }
  __device__ __forceinline__ float* replayed(int index) const {
    constexpr int kEach = kKeptTokens / kReplayTokens;
    return p_.replayed + (static_cast<int64_t>(blockIdx.x) * kEach + index) * kTileElements;
  }

  // Calls f(element, its offset in a [K, V] or [V, K] matrix) for the elements inside the matrix.
  template <class F>
  __device__ __forceinline__ void for_elements(Tile& tile, F&& f) const {
    const int first_value = value_block_ * L::kValues + value_;
    const int key_stride = p_.state_v_first ? 1 : p_.V, value_stride = p_.state_v_first ? p_.K : 1;
#pragma unroll
    for (int i = 0; i < kThreadKeys; ++i)
#pragma unroll
      for (int c = 0; c < kThreadValues; ++c) {
        const int key = key_ + i, value = first_value + c;
        if (key < p_.K && value < p_.V) f(tile.x[i][c], key * key_stride + value * value_stride);
      }
  }
  __device__ __forceinline__ int64_t matrix() const {
    return run_.state * p_.state_stride_n + run_.head * p_.state_stride_h;
  }
  __device__ __forceinline__ void load_matrix(Tile& tile, const void* from) const {
    const auto* states = static_cast<const float*>(from);
    tile.clear();
    if (states == nullptr) return;
    for_elements(tile, [&](float& x, int offset) { x = states[matrix() + offset]; });
  }
  __device__ __forceinline__ void store_matrix(Tile& tile) const {
    for_elements(tile, [&](float& x, int offset) { p_.dh0[matrix() + offset] = x; });
  }

  __device__ __forceinline__ void stage(int64_t first, int count) {
    __syncthreads();  // the previous tokens are read
    s_.tokens.template load<kBlockThreads>(p_, run_, first, count, value_block_ * L::kValues);
    __syncthreads();  // the tokens are written
  }

  // S = P + k vᵀ with P = a ⊙ S ⊙ b, in place; P is also stored in `decayed` if given.
  __device__ __forceinline__ void step(Tile& S, int t, Tile* decayed = nullptr) const {
    const Keys k(&s_.tokens.k[t][key_]), a(&s_.tokens.a[t][key_]);
    const Values v(&s_.tokens.v[t][value_]), b(&s_.tokens.b[t][value_]);
#pragma unroll
    for (int i = 0; i < kThreadKeys; ++i)
#pragma unroll
      for (int c = 0; c < kThreadValues; ++c) {
        const float P = a[i] * S.x[i][c] * b[c];
        if (decayed != nullptr) decayed->x[i][c] = P;
        S.x[i][c] = fmaf(k[i], v[c], P);
      }
  }

  // Computes and keeps the states at the start of all parts of a sequence except the first, whose
  // state is state_in.
  __device__ __forceinline__ void keep_states() {
    if (parts() <= 1) return;
    Tile S;
    load_matrix(S, p_.state_in);
    for (int64_t part = 1; part < parts(); ++part) {
      for (int t0 = 0; t0 < kKeptTokens; t0 += L::kStageTokens) {
        stage((part - 1) * kKeptTokens + t0, L::kStageTokens);
#pragma unroll 1
        for (int t = 0; t < L::kStageTokens; ++t) step(S, t);
      }
      S.store(kept(part));
    }
  }

  // Recomputes the states of a part, every kReplayTokens tokens.
  __device__ __forceinline__ void replay(int64_t part, int64_t first, int count) {
    Tile S;
    if (part == 0)
      load_matrix(S, p_.state_in);
    else
      S.load(kept(part));
    for (int t0 = 0; t0 < count; t0 += L::kStageTokens) {
      const int here = count - t0 < L::kStageTokens ? count - t0 : L::kStageTokens;
      stage(first + t0, here);
#pragma unroll 1
      for (int t = 0; t < here; ++t) {
        if (t % kReplayTokens == 0) S.store(replayed((t0 + t) / kReplayTokens));
        step(S, t);
      }
    }
  }

  __device__ __forceinline__ void gradients(int64_t first, int count, Tile& dS) {
    const int stages = (count + L::kStageTokens - 1) / L::kStageTokens;
    for (int s = stages - 1; s >= 0; --s) {
      const int t0 = s * L::kStageTokens;
      const int here = count - t0 < L::kStageTokens ? count - t0 : L::kStageTokens;
      stage(first + t0, here);
#pragma unroll 1
      for (int r = (here - 1) / kReplayTokens; r >= 0; --r) {
        const int t = r * kReplayTokens;
        const bool both = t + 1 < here;
        Tile P0, P1, S;
        S.load(replayed((t0 + t) / kReplayTokens));
        step(S, t, &P0);
        if (both) {
          step(S, t + 1, &P1);
          token(P1, t + 1, 1, dS);
        }
        token(P0, t, 0, dS);
        __syncthreads();  // the warps' sums are written
        store(first + t0, t, both ? 2 : 1);
        __syncthreads();  // and are read before the next sums are written
      }
    }
  }

  // Computes one token's gradients, summed over this warp; dS becomes the gradient of S_{t-1}.
  __device__ __forceinline__ void token(const Tile& P, int t, int slot, Tile& dS) {
    const Keys q(&s_.tokens.q[t][key_]), k(&s_.tokens.k[t][key_]), a(&s_.tokens.a[t][key_]);
    const Values v(&s_.tokens.v[t][value_]), b(&s_.tokens.b[t][value_]);
    const Values d_o(&s_.tokens.d_o[t][value_]);
    float keys[kKeyGrads][kThreadKeys]{}, values[kValueGrads][kThreadValues]{};
#pragma unroll
    for (int i = 0; i < kThreadKeys; ++i)
#pragma unroll
      for (int c = 0; c < kThreadValues; ++c) {
        const float g = fmaf(q[i], d_o[c], dS.x[i][c]), p = P.x[i][c];
        keys[kDq][i] = fmaf(fmaf(k[i], v[c], p), d_o[c], keys[kDq][i]);
        keys[kDk][i] = fmaf(g, v[c], keys[kDk][i]);
        keys[kDgk][i] = fmaf(p, g, keys[kDgk][i]);
        values[kDv][c] = fmaf(k[i], g, values[kDv][c]);
        values[kDgv][c] = fmaf(p, g, values[kDgv][c]);
        dS.x[i][c] = a[i] * g * b[c];
      }
    const int lane = threadIdx.x % 32;
    constexpr int kLanes = L::kValueLanes;
    const int key = key_ + (lane & 1) * 4 + (kLanes == 4 ? (lane >> 1 & 1) * 2 : 0);
#pragma unroll
    for (int g = 0; g < kKeyGrads; ++g) {
      reduce_halves<kThreadKeys>(keys[g], 1);
      if constexpr (kLanes == 4) reduce_halves<kThreadKeys / 2>(keys[g], 2);
#pragma unroll
      for (int i = 0; i < kThreadKeys / kLanes; i += 2)
        *reinterpret_cast<float2*>(&s_.keys[slot][g][value_warp_][key + i]) =
            make_float2(keys[g][i], keys[g][i + 1]);
    }
    const int value = value_ + (lane / kLanes & 1) * 2 + (lane / (2 * kLanes) & 1);
#pragma unroll
    for (int g = 0; g < kValueGrads; ++g) {
      reduce_halves<kThreadValues>(values[g], kLanes);
      reduce_halves<kThreadValues / 2>(values[g], 2 * kLanes);
#pragma unroll
      for (int mask = 4 * kLanes; mask < 32; mask *= 2)
        values[g][0] += __shfl_xor_sync(0xffffffffu, values[g][0], mask);
      if (lane < 4 * kLanes) s_.values[slot][g][key_warp_][value] = values[g][0];
    }
  }

  // Adds the warps' sums of `count` tokens, from token t of the stage on, and stores them.
  __device__ __forceinline__ void store(int64_t stage_first, int t, int count) const {
    for (int i = threadIdx.x; i < count * kKeyGrads * kK; i += kBlockThreads) {
      const int slot = i / (kKeyGrads * kK), grad = i / kK % kKeyGrads, key = i % kK;
      if (key >= p_.K) continue;
      float x = s_.keys[slot][grad][0][key];
#pragma unroll
      for (int warp = 1; warp < L::kValueWarps; ++warp) x += s_.keys[slot][grad][warp][key];
      if (grad == kDq) x *= p_.scale;
      if (grad == kDgk && s_.tokens.a[t + slot][key] == 0.f) x = 0;  // a reset, also if x is NaN
      put_key(grad, stage_first + t + slot, key, x);
    }
    for (int i = threadIdx.x; i < count * kValueGrads * L::kValues; i += kBlockThreads) {
      const int slot = i / (kValueGrads * L::kValues), grad = i / L::kValues % kValueGrads;
      const int value = i % L::kValues;
      float x = s_.values[slot][grad][0][value];
#pragma unroll
      for (int warp = 1; warp < L::kKeyWarps; ++warp) x += s_.values[slot][grad][warp][value];
      if (grad == kDgv && s_.tokens.b[t + slot][value] == 0.f) x = 0;
      put_value(grad, stage_first + t + slot, value, x);
    }
  }

  // Outputs are contiguous, so dq, dk, dgk and their partial sums share an index.
  __device__ __forceinline__ void put_key(int grad, int64_t t, int key, float x) const {
    const Rows& r = grad == kDq ? p_.dq : grad == kDk ? p_.dk : p_.dgk;
    if (r.data == nullptr) return;
    const int64_t element = row_offset(p_, r, run_, t) + key;
    if (p_.partials == nullptr) return store_any(r.data, r.dtype, element, x);
    const int64_t elements = p_.B * p_.T * p_.H * p_.K;
    p_.partials[(grad * plan_.value_blocks + value_block_) * elements + element] = x;
  }
  __device__ __forceinline__ void put_value(int grad, int64_t t, int j, float x) const {
    const Rows& r = grad == kDv ? p_.dv : p_.dgv;
    const int value = value_block_ * L::kValues + j;
    if (r.data != nullptr && value < p_.V)
      store_any(r.data, r.dtype, row_offset(p_, r, run_, t) + value, x);
  }

  // Writes zeros for tokens that belong to no sequence.
  __device__ __forceinline__ void zeros() const {
    for (int64_t t = 0; t < run_.length; ++t) {
      for (int i = threadIdx.x; i < kKeyGrads * p_.K; i += kBlockThreads)
        put_key(i / p_.K, t, i % p_.K, 0.f);
      for (int i = threadIdx.x; i < kValueGrads * L::kValues; i += kBlockThreads)
        put_value(i / L::kValues, t, i % L::kValues, 0.f);
    }
  }

  const Recurrence& p_;
  const RecurrentBackwardPlan& plan_;
  L& s_;
  Run run_;
  int value_block_, key_warp_, value_warp_;
  int key_, value_;  // first of this thread; value_ counts from the block's first
};

template <int kK>
__global__ void __launch_bounds__(kBlockThreads, 1)
    backward_kernel(const __grid_constant__ Recurrence p,
                    const __grid_constant__ RecurrentBackwardPlan plan) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Layout<kK>*>(s_bytes);
  Backward<kK> backward(p, plan, s);
  const int64_t items = count_runs(p) * plan.value_blocks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) backward.run(item);
}

// Sums the partial results of the value blocks into dq, dk and dgk, first block first.
__global__ void __launch_bounds__(kBlockThreads) sum_partials(Recurrence p, int value_blocks) {
  const int64_t elements = p.B * p.T * p.H * p.K;
  const int grad = blockIdx.y;
  const Rows& r = grad == kDq ? p.dq : grad == kDk ? p.dk : p.dgk;
  const float* partials = p.partials + grad * value_blocks * elements;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlockThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x; i < elements;
       i += stride) {
    float x = partials[i];
    for (int block = 1; block < value_blocks; ++block) x += partials[block * elements + i];
    store_any(r.data, r.dtype, i, x);
  }
}

}  // namespace

RecurrentBackwardPlan plan_recurrent_backward(const Recurrence& p, int multiprocessors) {
  RecurrentBackwardPlan plan{};
  with_keys(p.K, [&](auto keys) {
    plan.value_blocks = blocks_of(p.V, Layout<decltype(keys)::value>::kValues);
  });
  const int64_t items = count_runs(p) * plan.value_blocks;
  plan.blocks = items < multiprocessors ? items : multiprocessors;
  const int64_t longest = p.T == 0 ? 0 : (p.T - 1) / kKeptTokens;
  const int64_t parts = p.cu_seqlens.data != nullptr ? p.T / kKeptTokens : p.N * longest;
  plan.kept = parts * p.H * plan.value_blocks * kTileElements;
  plan.replayed = plan.blocks * (kKeptTokens / kReplayTokens) * kTileElements;
  const int64_t grads = p.dgk.data != nullptr ? kKeyGrads : kDgk;
  plan.partials = plan.value_blocks == 1 ? 0 : grads * plan.value_blocks * p.B * p.T * p.H * p.K;
  return plan;
}

void recurrent_backward(const Recurrence& p, const RecurrentBackwardPlan& plan,
                        cudaStream_t stream) {
  if (plan.blocks == 0) return;
  with_keys(p.K, [&](auto keys) {
    constexpr auto kernel = backward_kernel<decltype(keys)::value>;
    constexpr size_t kBytes = sizeof(Layout<decltype(keys)::value>);
    static_assert(kBytes <= kSharedOfEveryGpu);
    static const DynamicShared shared(kernel, kBytes);
    shared.allow();
    kernel<<<static_cast<unsigned>(plan.blocks), kBlockThreads, kBytes, stream>>>(p, plan);
  });
  if (plan.partials == 0) return;
  constexpr int64_t kMostBlocks = 65536;
  const int64_t blocks = blocks_of(p.B * p.T * p.H * p.K, int64_t{kBlockThreads});
  const dim3 grid(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks),
                  p.dgk.data != nullptr ? kKeyGrads : kDgk);
  sum_partials<<<grid, kBlockThreads, 0, stream>>>(p, static_cast<int>(plan.value_blocks));
}

}  // namespace gla_ext::cuda
