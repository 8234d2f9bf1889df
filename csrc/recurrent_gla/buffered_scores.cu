// The first kernel of a step with buffers. With n tokens in the buffer, T new ones behind them and
// a = exp gk:
//   A_tj = scale Σ_d q_td k_jd a_{j+1,d} .. a_{n+t,d}      q^_t = scale q_t ⊙ a_0 .. a_{n+t}
// If the new tokens do not fit, n = 0 for these, and the buffer's keys are decayed to its end:
//   k~_j = k_j ⊙ a_{j+1} .. a_{n-1}
//
// grid    (row, head), a thread for one key or several
// reads   q, k, gk [B, T, H | HK, K], v [B, T, HK, V], the buffers [P, L, HK, K | V]
// writes  A [B, H, T, 16], q^ [B, H, T, Kp], k~ and their decay, the new tokens to the buffers, and
//         before that the v that they replace in a fold
// Decays are running products, exact at a reset; everything is fp32. The next kernel starts at
// once.
#include "buffered.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "drafts.cuh"

namespace gla_ext::cuda {
namespace recurrent {
namespace {

// One channel of some places of a buffer, in the format of memory: of its first `held` tokens and,
// behind them, of new ones, up to place `end`. Absent tensors and other places are 0.
constexpr int kLoaded = 8;
struct Column {
  uint32_t bits[kLoaded];

  template <class Word>
  __device__ __forceinline__ void load(const Rows& buffer, int64_t old, const Rows& tokens,
                                       int64_t fresh, int first, int held, int end) {
    int64_t old_step = buffer.stride_t, step = tokens.stride_t;
    // No multiple of them is kept for the next call: registers are few.
    asm volatile("" : "+l"(old_step), "+l"(step));
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) {
      const int j = first + i;
      bits[i] = 0;
      if (j < held)
        bits[i] = static_cast<const Word*>(buffer.data)[old + j * old_step];
      else if (j < end && tokens.data != nullptr)
        bits[i] = static_cast<const Word*>(tokens.data)[fresh + (j - held) * step];
    }
  }
  __device__ __forceinline__ Column(const Rows& buffer, int64_t old, const Rows& tokens,
                                    int64_t fresh, int first, int held, int end) {
    if (buffer.dtype == DType::kFloat)
      load<uint32_t>(buffer, old, tokens, fresh, first, held, end);
    else
      load<uint16_t>(buffer, old, tokens, fresh, first, held, end);
  }
};

// Calls f(place, k, decay) of one key channel for every place, the last first. Those from `end` on
// have no token: k = 0 and a decay of 1.
template <class F>
__device__ __forceinline__ void for_places(const Recurrence& p, const Buffers& b,
                                           const BufferRow& row, int key, int held, int end,
                                           F&& f) {
  if (key >= p.K) held = end = 0;
#pragma unroll
  for (int first = kMostBuffered - kLoaded; first >= 0; first -= kLoaded) {
    const Column k(b.k, row.buffer_offset(b.k, 0) + key, p.k, row.offset(p.k, 0) + key, first, held,
                   end);
    const Column g(b.g, row.buffer_offset(b.g, 0) + key, p.gk,
                   row.offset(p.gk, 0) + p.gk_step * key, first, held, end);
#pragma unroll
    for (int i = kLoaded - 1; i >= 0; --i)
      f(first + i, value_of(k.bits[i], b.k.dtype), decay_of(value_of(g.bits[i], b.g.dtype)));
  }
}

// k~ of one key channel, and the decay of all tokens of the buffer.
__device__ __forceinline__ void store_fold_keys(const Recurrence& p, const Buffers& b,
                                                const BufferRow& row, int key) {
  const int Kp = padded_keys(p.K);
  if (key >= Kp) return;
  float* to = b.keys + int64_t{row.keys} * kFoldRows * Kp + key;
  float w = 1;
  for_places(p, b, row, key, row.held, row.held, [&](int j, float k, float a) {
    to[j * Kp] = w * k;
    w *= a;
  });
  to[kMostBuffered * Kp] = w;
}

// Copies an element of a row as it is.
__device__ __forceinline__ void copy_element(const Rows& to, int64_t i, const Rows& from,
                                             int64_t of) {
  if (to.dtype == DType::kFloat)
    static_cast<uint32_t*>(to.data)[i] = load_bits(from, of, from.data != nullptr);
  else
    static_cast<uint16_t*>(to.data)[i] =
        static_cast<uint16_t>(load_bits(from, of, from.data != nullptr));
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    buffered_scores_kernel(const __grid_constant__ Recurrence p,
                           const __grid_constant__ Buffers b) {
  constexpr int kWarpsOfBlock = kThreads / 32;
  __shared__ float s_parts[kMostBuffered][kWarpsOfBlock][kMostBuffered];
  sm90::release_next_kernel();
  const BufferRow row(p, b, blockIdx.x);
  if (row.slot < 0) return;
  const int T = static_cast<int>(p.T), first_place = row.folds ? 0 : row.held;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, Kp = padded_keys(p.K);
#pragma unroll 1
  for (int first = 0; first < Kp; first += kThreads) {
    const int key = first + static_cast<int>(threadIdx.x);
    if (row.folds && row.owns_keys) store_fold_keys(p, b, row, key);
#pragma unroll 1
    for (int t = 0; t < T; ++t) {
      float w = p.scale * value_of(load_bits(p.q, row.offset(p.q, t) + key, key < p.K), p.q.dtype);
      float x[kMostBuffered];
      for_places(p, b, row, key, first_place, first_place + t + 1, [&](int j, float k, float a) {
        x[j] = w * k;
        w *= a;
      });
      if (key < p.K) b.queries[(int64_t{row.run} * T + t) * Kp + key] = w;
      const float sum = sums_of_warp(x);
      if (lane % 2 == 0) {
        float& part = s_parts[t][warp][lane / 2];
        part = first == 0 ? sum : part + sum;
      }
    }
    if (row.owns_keys && key < p.K) {
#pragma unroll 1
      for (int t = 0; t < T; ++t) {
        copy_element(b.k, row.buffer_offset(b.k, first_place + t) + key, p.k,
                     row.offset(p.k, t) + key);
        copy_element(b.g, row.buffer_offset(b.g, first_place + t) + key, p.gk,
                     row.offset(p.gk, t) + p.gk_step * key);
      }
    }
  }
  if (row.owns_keys) {
#pragma unroll 1
    for (int value = threadIdx.x; value < p.V; value += kThreads)
#pragma unroll 1
      for (int t = 0; t < T; ++t) {
        const int64_t place = row.buffer_offset(b.v, first_place + t) + value;
        if (row.folds && t < row.held)
          b.values[(int64_t{row.keys} * T + t) * p.V + value] =
              value_of(load_bits(b.v, place, true), b.v.dtype);
        copy_element(b.v, place, p.v, row.offset(p.v, t) + value);
      }
  }
  __syncthreads();  // every warp's parts are written
  for (int i = threadIdx.x; i < T * kMostBuffered; i += kThreads) {
    const int t = i / kMostBuffered, j = i % kMostBuffered;
    float sum = s_parts[t][0][j];
    for (int w = 1; w < kWarpsOfBlock; ++w) sum += s_parts[t][w][j];
    b.scores[int64_t{row.run} * T * kMostBuffered + i] = sum;
  }
}

}  // namespace
}  // namespace recurrent

void recurrent_buffered_scores(const Recurrence& p, const Buffers& buffers, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.B * p.H);
  if (p.K <= 256)
    recurrent::buffered_scores_kernel<256><<<blocks, 256, 0, stream>>>(p, buffers);
  else
    recurrent::buffered_scores_kernel<512><<<blocks, 512, 0, stream>>>(p, buffers);
}

}  // namespace gla_ext::cuda
