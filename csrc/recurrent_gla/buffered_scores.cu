// The first kernel of a step with buffers. With n tokens in the buffer, T new ones behind them and
// a = exp gk:
//   A_tj = scale Σ_d q_td k_jd a_{j+1,d} .. a_{n+t,d}      q^_t = scale q_t ⊙ a_0 .. a_{n+t}
// If the new tokens do not fit, n = 0 for these, and the buffer's keys are decayed to its end:
//   k~_j = k_j ⊙ a_{j+1} .. a_{n-1}
//
// grid    (head, row); 128 threads for each of up to 4 tokens have 256 keys at a time
// reads   q, k, gk [B, T, H | HK, K], v [B, T, HK, V], the buffers [P, L, HK, K | V]
// writes  A [B, H, T, 16], q^ [B, H, T, Kp], k~ and their decay, the new tokens to the buffers, and
//         before that the v that they replace in a fold, if heads share it
// Decays are running products, exact at a reset; everything is fp32. The next kernel starts at
// once.
#include "buffered.cuh"
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "cuda/sm90/tiles/ptx.cuh"
#include "drafts.cuh"

namespace gla_ext::cuda {
namespace recurrent {
namespace {

constexpr int kScoreThreads = 128, kScoreKeys = 2 * kScoreThreads;  // of a token at a time
constexpr int kScoreWarps = kScoreThreads / 32;

// The number of its first key channel among those of a block.
__device__ __forceinline__ int first_key() { return threadIdx.x % kScoreThreads * 2; }

// Neighbouring key channels; a thread has two.
struct Pair {
  float x, y;
};

// Every place of a buffer in shared memory: numbers of type T, which have come as numbers of type
// From, in the second half of a row if these are smaller.
template <class T, class From = T>
struct Places {
  T rows[kMostBuffered][kScoreKeys];

  __device__ __forceinline__ From* raw(int j) {
    constexpr int kBefore = sizeof(T) / sizeof(From) - 1;
    return reinterpret_cast<From*>(rows[j]) + kBefore * kScoreKeys;
  }
  __device__ __forceinline__ Pair pair(int j) const {
    const T* at = &rows[j][first_key()];
    if constexpr (sizeof(T) == 4) {
      const float2 y = *reinterpret_cast<const float2*>(at);
      return {y.x, y.y};
    } else {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(at);
      return {element_of<T>(&word, 0), element_of<T>(&word, 1)};
    }
  }
  // Copies channels from `first` on of the first `held` tokens of the buffer and of `added` new
  // ones behind them. step: from a new token's channel to the next. Channels beyond K are 0, or
  // have none of their pair.
  __device__ __forceinline__ void copy(const BufferRow& row, const Rows& buffer, const Rows& tokens,
                                       int step, int held, int added, int first, int K) {
    constexpr int kEach = 16 / sizeof(From), kOfToken = kScoreKeys / kEach;
    const bool fast = K % kEach == 0 && buffer.aligned &&
                      (added == 0 || (step == 1 && tokens.aligned && tokens.data != nullptr));
    if (fast) {
#pragma unroll 2
      for (int i = threadIdx.x; i < (held + added) * kOfToken; i += blockDim.x) {
        const int j = i / kOfToken, c = i % kOfToken * kEach;
        const bool old = j < held;
        const From* from =
            old ? static_cast<const From*>(buffer.data) + row.buffer_offset(buffer, j)
                : static_cast<const From*>(tokens.data) + row.offset(tokens, j - held);
        if (first + c < K) sm90::copy16(sm90::shared_address(raw(j) + c), from + first + c, true);
      }
      return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < (held + added) * kScoreThreads; i += blockDim.x) {
      const int j = i / kScoreThreads;
      const bool old = j < held;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = first_key() + e;
        const From* from =
            old ? static_cast<const From*>(buffer.data) + row.buffer_offset(buffer, j) + first + c
                : static_cast<const From*>(tokens.data) + row.offset(tokens, j - held) +
                      step * (first + c);
        const bool there = first + c < K && (old || tokens.data != nullptr);
        raw(j)[c] = there ? *from : from_float<From>(0.f);
      }
    }
  }
  // Writes this thread's channels of place j, before `decay`, to the row `to` of the buffer.
  __device__ __forceinline__ void store(From* to, int j, int first, int K) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = first_key() + e;
      if (first + c < K) to[first + c] = raw(j)[c];
    }
  }
  // Makes decays of the gates of places own, own + step, .. before n, four at a time. As decay_of,
  // but selected before exp, and exp is made of places without a gate too: no exp waits for
  // another.
  __device__ __forceinline__ void decay(int own, int step, int n) {
    const auto of = [](float x) { return expf(x * kLog2E < kReset ? -INFINITY : x); };
#pragma unroll 1
    for (int before = 0; before < n; before += 4 * step) {
      Pair g[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int j = before + u * step + own;
        const From* at = raw(j) + first_key();
        g[u] = j < n ? Pair{to_float(at[0]), to_float(at[1])} : Pair{};
      }
      if (sizeof(From) < sizeof(T)) __syncthreads();  // the gates of these places have been read
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        g[u] = {of(g[u].x), of(g[u].y)};
        asm volatile("" : "+f"(g[u].x), "+f"(g[u].y));
      }
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int j = before + u * step + own;
        if (j < n) *reinterpret_cast<float2*>(&rows[j][first_key()]) = make_float2(g[u].x, g[u].y);
      }
    }
    __syncthreads();  // the decays are there
  }
};

// Calls f(i, w, k_j) for i from 0 to `last` and places j = last - i; after each, w is decayed by
// the gate of its place. i is a constant. Four places, or two with keys in fp32, for which there
// are registers, have one branch, so that no load waits for another.
template <class In, class Gate, class F>
__device__ __forceinline__ void for_places(const Places<In>& k, const Places<float, Gate>& a,
                                           int last, Pair& w, F&& f) {
  constexpr int kGroup = sizeof(In) == 4 ? 2 : 4;
  const auto visit = [&](int i) {
    const Pair a_j = a.pair(last - i);
    f(i, w, k.pair(last - i));
    w = {w.x * a_j.x, w.y * a_j.y};
  };
#pragma unroll
  for (int i = 0; i < kMostBuffered; i += kGroup) {
    if (i + kGroup - 1 <= last) {
#pragma unroll
      for (int u = 0; u < kGroup; ++u) visit(i + u);
    } else {
#pragma unroll
      for (int u = 0; u < kGroup - 1; ++u)
        if (i + u <= last) visit(i + u);
    }
  }
}

template <class In, class Gate>
__global__ void __launch_bounds__(4 * kScoreThreads, 2)
    buffered_scores_kernel(const __grid_constant__ Recurrence p,
                           const __grid_constant__ Buffers b) {
  __shared__ __align__(16) Places<In> k;
  __shared__ __align__(16) Places<float, Gate> a;
  extern __shared__ float s_parts[][kScoreWarps][kMostBuffered];  // [T]
  sm90::release_next_kernel();
  if (row_of_block() >= p.B) return;
  const BufferRow row(p, b, row_of_block(), blockIdx.x);
  if (row.slot < 0) return;
  const int T = static_cast<int>(p.T), held = row.folds ? 0 : row.held, Kp = b.Kp;
  const int warp = threadIdx.x % kScoreThreads / 32, lane = threadIdx.x % 32;
  const int own = threadIdx.x / kScoreThreads, tokens = blockDim.x / kScoreThreads;
  const bool owns = row.owns_keys(b);
  const int folded = row.folds && owns ? row.held : 0;
#pragma unroll 1
  for (int first = 0; first < Kp; first += kScoreKeys) {
    const int key = first + first_key();
    const bool there = key < p.K;
    const auto query = [&](int t) {
      const In* q = static_cast<const In*>(p.q.data) + row.offset(p.q, t) + key;
      return Pair{there ? p.scale * to_float(q[0]) : 0.f,
                  key + 1 < p.K ? p.scale * to_float(q[1]) : 0.f};
    };
    const auto copy = [&](int old, int added) {
      k.copy(row, b.k, p.k, 1, old, added, first, p.K);
      a.copy(row, b.g, p.gk, p.gk_step, old, added, first, p.K);
      sm90::commit_copies();
      sm90::wait_for_copies<0>();
      __syncthreads();  // the tokens are there
      for (int j = own; owns && j < old + added; j += tokens)
        if (j >= old) {
          k.store(static_cast<In*>(b.k.data) + row.buffer_offset(b.k, j), j, first, p.K);
          a.store(static_cast<Gate*>(b.g.data) + row.buffer_offset(b.g, j), j, first, p.K);
        }
      a.decay(own, tokens, old + added);
    };
    if (folded > 0) {
      copy(folded, 0);
      if (own == 0 && key < Kp) {
        float* to = b.keys + row.keys(b) * kFoldRows * Kp + key;
        Pair w{1, 1};
        const int last = there ? folded - 1 : -1;
        for_places(k, a, last, w, [&](int i, Pair w, Pair k_j) {
          *reinterpret_cast<float2*>(to + (last - i) * Kp) = make_float2(w.x * k_j.x, w.y * k_j.y);
        });
        for (int j = last + 1; j < kMostBuffered; ++j)
          *reinterpret_cast<float2*>(to + j * Kp) = float2{};
        *reinterpret_cast<float2*>(to + kMostBuffered * Kp) = make_float2(w.x, w.y);
      }
      __syncthreads();  // the tokens have been read
    }
    Pair w = query(own);
    copy(held, T);
#pragma unroll 1
    for (int t = own; t < T; t += tokens) {
      if (t != own) w = query(t);
      const int last = held + t;
      float x[kMostBuffered]{};  // x[i]: of place last - i
      for_places(k, a, there ? last : -1, w,
                 [&](int i, Pair w, Pair k_j) { x[i] = fmaf(w.y, k_j.y, w.x * k_j.x); });
      if (key < Kp)
        *reinterpret_cast<float2*>(b.queries + (int64_t{row.run} * T + t) * Kp + key) =
            make_float2(w.x, w.y);
      const float sum = sums_of_warp(x);
      if (lane % 2 == 0) {
        const int i = lane / 2;
        float& part = s_parts[t][warp][i <= last ? last - i : i];
        part = first == 0 ? sum : part + sum;
      }
    }
    __syncthreads();  // the tokens have been read, and every warp's parts are written
  }
  for (int i = threadIdx.x; i < T * kMostBuffered; i += blockDim.x) {
    const int t = i / kMostBuffered, j = i % kMostBuffered;
    float sum = s_parts[t][0][j];
#pragma unroll
    for (int w = 1; w < kScoreWarps; ++w) sum += s_parts[t][w][j];
    b.scores[int64_t{row.run} * T * kMostBuffered + i] = sum;
  }
  const int replaced = b.group == 1 ? 0 : min(T, folded);
#pragma unroll 1
  for (int i = threadIdx.x; i < replaced * p.V; i += blockDim.x) {
    const int64_t place = row.buffer_offset(b.v, i / p.V) + i % p.V;
    b.values[row.keys(b) * T * p.V + i] = to_float(static_cast<const In*>(b.v.data)[place]);
  }
}

}  // namespace
}  // namespace recurrent

void recurrent_buffered_scores(const Recurrence& p, const Buffers& buffers, cudaStream_t stream) {
  const int threads = recurrent::kScoreThreads * buffers.tokens;
  const dim3 blocks = recurrent::blocks_of_rows(p.H, p.B);
  constexpr size_t each = recurrent::kScoreWarps * kMostBuffered * sizeof(float);  // of a token
  with_dtype(p.k.dtype, [&](auto in) {
    with_dtype(buffers.g.dtype, [&](auto gate) {
      using In = typename decltype(in)::type;
      using Gate = typename decltype(gate)::type;
      constexpr auto kernel = recurrent::buffered_scores_kernel<In, Gate>;
      static const DynamicShared shared(kernel, kMostBuffered * each, /*like_next=*/true);
      shared.allow();
      kernel<<<blocks, threads, p.T * each, stream>>>(p, buffers);
    });
  });
}

}  // namespace gla_ext::cuda
