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
#include "cuda/sm90/tiles/ptx.cuh"
#include "drafts.cuh"

namespace gla_ext::cuda {
namespace recurrent {
namespace {

// What of a tensor a block has in shared memory, in the format of memory: kThreads key channels of
// every place of a buffer.
template <int kThreads>
struct Places {
  unsigned char* bytes;
  DType dtype;

  __device__ __forceinline__ int size() const { return dtype == DType::kFloat ? 4 : 2; }
  __device__ __forceinline__ uint32_t bits(int j) const {
    const int i = j * kThreads + static_cast<int>(threadIdx.x);
    return dtype == DType::kFloat ? reinterpret_cast<const uint32_t*>(bytes)[i]
                                  : reinterpret_cast<const uint16_t*>(bytes)[i];
  }
  __device__ __forceinline__ float operator[](int j) const { return value_of(bits(j), dtype); }

  // Copies `keys` channels from `first` on, of the first `held` tokens of the buffer and of `added`
  // new ones behind them. step: from a new token's channel to the next.
  __device__ __forceinline__ void copy(const BufferRow& row, const Rows& buffer, const Rows& tokens,
                                       int step, int held, int added, int first, int keys) const {
    const bool fast = keys * size() % 16 == 0 && buffer.aligned &&
                      (added == 0 || (step == 1 && tokens.aligned && tokens.data != nullptr));
    // One channel a thread, or 16 bytes wherever they are.
    const int each = fast ? 16 / size() : 1, of_token = fast ? keys / each : kThreads;
#pragma unroll 1
    for (int i = threadIdx.x; i < (held + added) * of_token; i += kThreads) {
      const int j = i / of_token, key = i % of_token * each;
      const bool old = j < held;
      const Rows& from = old ? buffer : tokens;
      const int64_t of = old ? row.buffer_offset(buffer, j) + first + key
                             : row.offset(tokens, j - held) + step * (first + key);
      unsigned char* to = bytes + (j * kThreads + key) * size();
      if (fast) {
        const auto* data = static_cast<const char*>(from.data);
        sm90::copy16(sm90::shared_address(to), data + of * size(), true);
      } else if (key < keys) {
        const uint32_t x = load_bits(from, of, from.data != nullptr);
        if (dtype == DType::kFloat)
          *reinterpret_cast<uint32_t*>(to) = x;
        else
          *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(x);
      }
    }
  }
  // Writes this thread's channel of place j to an element of the buffer.
  __device__ __forceinline__ void store(const Rows& buffer, int64_t to, int j) const {
    if (dtype == DType::kFloat)
      static_cast<uint32_t*>(buffer.data)[to] = bits(j);
    else
      static_cast<uint16_t*>(buffer.data)[to] = static_cast<uint16_t>(bits(j));
  }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1280 / kThreads)
    buffered_scores_kernel(const __grid_constant__ Recurrence p,
                           const __grid_constant__ Buffers b) {
  constexpr int kWarpsOfBlock = kThreads / 32;
  __shared__ float s_parts[kMostBuffered][kWarpsOfBlock][kMostBuffered];
  extern __shared__ __align__(16) unsigned char s_bytes[];
  sm90::release_next_kernel();
  const BufferRow row(p, b, blockIdx.x);
  if (row.slot < 0) return;
  const int T = static_cast<int>(p.T), held = row.folds ? 0 : row.held;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, Kp = padded_keys(p.K);
  const Places<kThreads> k{s_bytes, b.k.dtype};
  const Places<kThreads> g{s_bytes + kMostBuffered * kThreads * k.size(), b.g.dtype};
  const bool owns = row.owns_keys(p, b);
#pragma unroll 1
  for (int first = 0; first < Kp; first += kThreads) {
    const int key = first + static_cast<int>(threadIdx.x), left = p.K - first;
    const int keys = left < kThreads ? left : kThreads;
    const auto copy = [&](int old, int added) {
      __syncthreads();  // what was there has been read
      k.copy(row, b.k, p.k, 1, old, added, first, keys);
      g.copy(row, b.g, p.gk, p.gk_step, old, added, first, keys);
      sm90::commit_copies();
      sm90::wait_for_copies<0>();
      __syncthreads();  // the tokens are there
    };
    if (row.folds && owns) {
      copy(row.held, 0);
      float* to = b.keys + row.keys(p, b) * kFoldRows * Kp + key;
      float w = 1;
#pragma unroll 1
      for (int j = kMostBuffered - 1; j >= 0; --j) {
        const bool there = j < row.held && key < p.K;
        if (key < Kp) to[j * Kp] = there ? w * k[j] : 0.f;
        if (there) w *= decay_of(g[j]);
      }
      if (key < Kp) to[kMostBuffered * Kp] = w;
    }
    copy(held, T);
#pragma unroll 1
    for (int t = 0; t < T; ++t) {
      float w = p.scale * value_of(load_bits(p.q, row.offset(p.q, t) + key, key < p.K), p.q.dtype);
      float x[kMostBuffered];
#pragma unroll
      for (int j = kMostBuffered - 1; j >= 0; --j) {
        x[j] = 0;
        if (j > held + t || key >= p.K) continue;
        x[j] = w * k[j];
        w *= decay_of(g[j]);
      }
      if (key < Kp) b.queries[(int64_t{row.run} * T + t) * Kp + key] = w;
      const float sum = sums_of_warp(x);
      if (lane % 2 == 0) {
        float& part = s_parts[t][warp][lane / 2];
        part = first == 0 ? sum : part + sum;
      }
      if (owns && key < p.K) {
        k.store(b.k, row.buffer_offset(b.k, held + t) + key, held + t);
        g.store(b.g, row.buffer_offset(b.g, held + t) + key, held + t);
      }
    }
  }
  if (owns && row.folds) {
    const int replaced = T < row.held ? T : row.held;
#pragma unroll 1
    for (int i = threadIdx.x; i < replaced * p.V; i += kThreads) {
      const int64_t place = row.buffer_offset(b.v, i / p.V) + i % p.V;
      b.values[row.keys(p, b) * T * p.V + i] = value_of(load_bits(b.v, place, true), b.v.dtype);
    }
  }
  __syncthreads();  // every warp's parts are written
  for (int i = threadIdx.x; i < T * kMostBuffered; i += kThreads) {
    const int t = i / kMostBuffered, j = i % kMostBuffered;
    float sum = s_parts[t][0][j];
#pragma unroll
    for (int w = 1; w < kWarpsOfBlock; ++w) sum += s_parts[t][w][j];
    b.scores[int64_t{row.run} * T * kMostBuffered + i] = sum;
  }
}

template <int kThreads>
void launch_buffered_scores(const Recurrence& p, const Buffers& b, cudaStream_t stream) {
  const size_t bytes = kMostBuffered * kThreads * (bytes_of(b.k.dtype) + bytes_of(b.g.dtype));
  buffered_scores_kernel<kThreads>
      <<<static_cast<unsigned>(p.B * p.H), kThreads, bytes, stream>>>(p, b);
}

}  // namespace
}  // namespace recurrent

void recurrent_buffered_scores(const Recurrence& p, const Buffers& buffers, cudaStream_t stream) {
  if (p.K <= 128)
    recurrent::launch_buffered_scores<128>(p, buffers, stream);
  else
    recurrent::launch_buffered_scores<256>(p, buffers, stream);
}

}  // namespace gla_ext::cuda
