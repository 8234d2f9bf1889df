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

// k and the decays of one key channel, for every place of a buffer.
struct Channel {
  float k[kMostBuffered], a[kMostBuffered];

  // The first `held` places of the buffer and, behind them, `added` new tokens.
  __device__ __forceinline__ void load(const Recurrence& p, const Buffers& b, const BufferRow& row,
                                       int held, int added, int key) {
    uint32_t k_bits[kMostBuffered], g_bits[kMostBuffered];
#pragma unroll
    for (int j = 0; j < kMostBuffered; ++j) {
      const bool old = j < held, there = key < p.K && j < held + added;
      const Rows &from_k = old ? b.k : p.k, &from_g = old ? b.g : p.gk;
      const int64_t of_k = old ? row.buffer_offset(b.k, j) : row.offset(p.k, j - held);
      const int64_t of_g =
          old ? row.buffer_offset(b.g, j) + key : row.offset(p.gk, j - held) + p.gk_step * key;
      k_bits[j] = load_bits(from_k, of_k + key, there);
      g_bits[j] = load_bits(from_g, of_g, there && from_g.data != nullptr);
    }
#pragma unroll
    for (int j = 0; j < kMostBuffered; ++j) {
      k[j] = value_of(k_bits[j], b.k.dtype);
      a[j] = decay_of(value_of(g_bits[j], b.g.dtype));
    }
  }
};

// k~ of one key channel, and the decay of all tokens. Places without a token have k = 0 and a = 1.
__device__ __forceinline__ void store_fold_keys(const Recurrence& p, const Buffers& b,
                                                const BufferRow& row, const Channel& channel,
                                                int key) {
  const int Kp = padded_keys(p.K);
  if (key >= Kp) return;
  float x[kFoldPitch]{}, w = 1;
#pragma unroll
  for (int j = kMostBuffered - 1; j >= 0; --j) {
    x[j] = w * channel.k[j];
    w *= channel.a[j];
  }
  x[kMostBuffered] = w;
  if (p.state_v_first) {
    float* to = b.keys + int64_t{row.keys} * kFoldRows * Kp + key;
#pragma unroll
    for (int j = 0; j < kFoldRows; ++j) to[j * Kp] = x[j];
  } else {
    float* to = b.keys + (int64_t{row.keys} * Kp + key) * kFoldPitch;
#pragma unroll
    for (int j = 0; j < kFoldPitch; j += 4)
      *reinterpret_cast<float4*>(to + j) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
  }
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
__global__ void __launch_bounds__(kThreads)
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
    Channel channel;
    if (row.folds && row.owns_keys) {
      channel.load(p, b, row, row.held, 0, key);
      store_fold_keys(p, b, row, channel, key);
    }
    channel.load(p, b, row, first_place, T, key);
#pragma unroll 1
    for (int t = 0; t < T; ++t) {
      float w = p.scale * value_of(load_bits(p.q, row.offset(p.q, t) + key, key < p.K), p.q.dtype);
      float x[kMostBuffered];
#pragma unroll
      for (int j = kMostBuffered - 1; j >= 0; --j) {
        const bool earlier = j <= first_place + t;
        x[j] = earlier ? w * channel.k[j] : 0.f;
        if (earlier) w *= channel.a[j];
      }
      if (key < p.K) b.queries[(int64_t{row.run} * T + t) * Kp + key] = w;
      const float sum = sums_of_warp(x);
      if (lane % 2 == 0) {
        float& part = s_parts[t][warp][lane / 2];
        part = first == 0 ? sum : part + sum;
      }
    }
    if (row.owns_keys && key < p.K) {
      for (int t = 0; t < T; ++t) {
        copy_element(b.k, row.buffer_offset(b.k, first_place + t) + key, p.k,
                     row.offset(p.k, t) + key);
        copy_element(b.g, row.buffer_offset(b.g, first_place + t) + key, p.gk,
                     row.offset(p.gk, t) + p.gk_step * key);
      }
    }
  }
  if (row.owns_keys) {
    for (int value = threadIdx.x; value < p.V; value += kThreads)
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
