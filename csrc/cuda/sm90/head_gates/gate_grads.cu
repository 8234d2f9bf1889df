// The gradient of the gates, from the last token of a sequence to the first. Every pair of tokens i
// >= t > j contributes A_ij (do_i . v_j) to dg_t, and so does a pair of a token and a state, so
// that
//
//   dg_t = X + sum over i >= t of (q_i . dq_i - k_i . dk_i)      X = S . dS after the last token
//
// without the pairs of a token with itself. A pair adds one number, the same to fp32, to the sums
// of both its tokens (sweep.cuh), so it cancels at its earlier token. The rounding errors of pairs
// that have cancelled would add up. The sum therefore starts anew at a chunk that leaves next to
// nothing of the state: the sum before the chunk is then what the state contributes to the chunk's
// tokens. Nothing passes a reset, whose dg is 0.
//
// grid    (sequence, head); 64 threads for each of sixteen chunks at a time
// reads   g [B, T, H], HeadGates [B, entries, H], the dots of both sweeps
// writes  dg [B, T, H]
// All in fp32, in a fixed order.
#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "head_gates.h"
#include "sums.h"

namespace gla_ext::cuda::sm90 {
namespace head_gates::gate_grads {

constexpr int kAtOnce = 16;  // chunks at a time
constexpr int kThreadsOfBlock = kAtOnce * static_cast<int>(kChunk);
constexpr int kWarpsOfChunk = static_cast<int>(kChunk) / 32;
constexpr float kNothing = -24.f;  // log2 units: a decay below fp32's rounding

// The sum over tokens from one token on, up to the next token whose gate lets nothing pass.
struct Run {
  float sum;
  bool ends;   // at such a token, before the chunk's end
  bool first;  // nothing passes the first token's gate
};
__device__ __forceinline__ Run joined(const Run& x, const Run& next) {
  if (x.ends || next.first) return {x.sum, true, x.first};
  return {x.sum + next.sum, next.ends, x.first};
}
__device__ __forceinline__ Run from_lane(const Run& x, int lane) {
  return {__shfl_sync(0xffffffffu, x.sum, lane),
          __shfl_sync(0xffffffffu, static_cast<int>(x.ends), lane) != 0,
          __shfl_sync(0xffffffffu, static_cast<int>(x.first), lane) != 0};
}

struct Shared {
  Run second[kAtOnce];                  // of the chunk's second 32 tokens
  float given[kAtOnce][kWarpsOfChunk];  // the state's contribution, summed over a warp's tokens
  float sums[kAtOnce][kWarpsOfChunk];   // sum of all contributions of these tokens
  float decays[kAtOnce];                // of the chunk
};

__global__ void __launch_bounds__(kThreadsOfBlock) kernel(Problem p) {
  wait_for_previous_kernel();
  __shared__ Shared s;
  const int64_t n = blockIdx.x / p.H;
  const int head = static_cast<int>(blockIdx.x - n * p.H);
  const Sequence sequence = find_sequence(p, n);
  const int parts = static_cast<int>(dot_parts(p.K, p.V));
  const int all_parts = parts + static_cast<int>(pair_parts(p.K));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int own = thread / static_cast<int>(kChunk), token = thread % static_cast<int>(kChunk);
  const int warp = token / 32;
  float passes = 0;  // S . dS after the next chunk to be done
  if (p.dht != nullptr) {
    const auto* last = static_cast<const float*>(p.dg_intra.data) +
                       (n * p.H + head) * parts * (kLastDotBytes / sizeof(float));
    for (int i = 0; i < 4 * parts; ++i) passes += last[i];
  }
  const auto chunks = static_cast<int>(blocks_of(sequence.length, kChunk));
  for (int left = chunks; left > 0; left -= kAtOnce) {
    const int chunk = left - 1 - own;
    const int64_t at = chunk * kChunk + token, entry = (sequence.first_entry + chunk) * p.H + head;
    const bool there = chunk >= 0 && at < sequence.length;
    float given = 0, adds = 0, x = 0;
    if (there) {
      const auto* of_q = static_cast<const float*>(p.dq_intra.data) + entry * all_parts * kChunk;
      const auto* of_k = static_cast<const float*>(p.dk_intra.data) + entry * parts * kChunk;
      float pairs = 0, takes = 0;
      for (int part = 0; part < parts; ++part) {
        given += of_q[kChunk * part + token];
        takes += of_k[kChunk * part + token];
      }
      for (int part = parts; part < all_parts; ++part) pairs += of_q[kChunk * part + token];
      adds = given - takes + pairs;
      const int64_t row = p.grid.packed ? 0 : n;
      const auto* g = static_cast<const unsigned char*>(p.g.data);
      x = to_log2(load_any(
          g, p.g.dtype,
          row * p.g.stride_b + (sequence.start + at) * p.g.stride_t + head_offset(p.g, head)));
    }
    const bool nothing_passes = x <= kReset;
    Run run{adds, false, nothing_passes};
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const Run next = from_lane(run, (lane + lanes) % 32);
      if (lane + lanes < 32) run = joined(run, next);
    }
    float all = adds;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      given += __shfl_xor_sync(0xffffffffu, given, lanes);
      all += __shfl_xor_sync(0xffffffffu, all, lanes);
    }
    if (lane == 0) {
      if (warp == 1) s.second[own] = run;
      s.given[own][warp] = given;
      s.sums[own][warp] = all;
      if (warp == 0)
        s.decays[own] =
            chunk >= 0 ? reinterpret_cast<const HeadGates*>(p.prepared)[entry].decay[0] : 1.f;
    }
    __syncthreads();  // the chunks' sums are written
    if (warp == 0) run = joined(run, s.second[own]);
    float entering = passes;  // S . dS after this thread's chunk
    for (int i = 0; i < kAtOnce; ++i) {
      if (i == own) entering = passes;
      passes = s.decays[i] < exp2f(kNothing) ? s.given[i][0] + s.given[i][1]
                                             : passes + s.sums[i][0] + s.sums[i][1];
    }
    if (there) {
      const int64_t row = p.grid.packed ? 0 : n;
      store_any(p.dg.data, p.dg.dtype,
                row * p.dg.stride_b + (sequence.start + at) * p.dg.stride_t + head * p.dg.stride_h,
                nothing_passes ? 0.f
                : run.ends     ? run.sum
                               : run.sum + entering);
    }
    __syncthreads();  // the chunks' sums are read
  }
}

// Writes zeros after the last packed sequence.
__global__ void __launch_bounds__(kThreadsOfBlock) clear_tail(Problem p) {
  const Sequence tail = find_sequence(p, p.grid.N);
  for (int64_t i = blockIdx.x * kThreadsOfBlock + threadIdx.x; i < tail.length * p.H;
       i += static_cast<int64_t>(gridDim.x) * kThreadsOfBlock)
    store_any(p.dg.data, p.dg.dtype,
              (tail.start + i / p.H) * p.dg.stride_t + i % p.H * p.dg.stride_h, 0.f);
}

}  // namespace head_gates::gate_grads

void launch_head_gate_gate_grads(const Problem& p, cudaStream_t stream) {
  namespace gate_grads = head_gates::gate_grads;
  const int64_t blocks = p.grid.N * p.H;
  if (blocks == 0) return;
  launch_dependent(gate_grads::kernel, blocks, gate_grads::kThreadsOfBlock, 0, stream, p);
  if (p.grid.packed && p.grid.T > 0)
    launch(gate_grads::clear_tail, 64, gate_grads::kThreadsOfBlock, p, stream);
}

}  // namespace gla_ext::cuda::sm90
