// Forward of the gate's projection: z = h Wᵀ + b, g = max(logsigmoid(z) / τ, c).
//
// grid    a warp has 32 columns, whose weights it keeps in registers, and every streams-th tile of
//         16 tokens; no warp waits for another
// reads   h [rows, R], R up to 16, W [K, R], b [K]
// writes  g [rows, K]
// Products of bf16 or fp16 are accumulated in fp32, and everything else is fp32; g is rounded once.
// A row's bits depend only on the row.
#include "fragments.cuh"

namespace gla_ext::cuda {
namespace gate {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWarpsAtOnce = 32;  // warps a multiprocessor
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log(1 + exp(-|z|)). Small exponentials use the series, since 1 + e would round them away.
__device__ __forceinline__ float log1p_exp(float z) {
  const float e = exp2_ftz(-fabsf(z) * kLog2E);
  const float series = e * fmaf(e, fmaf(e, 1.f / 3, -0.5f), 1.f);
  return e < 0.015625f ? series : log2_of(1.f + e) * kLn2;
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ GateProjection p) {
  const int64_t groups = (p.width + kColumns - 1) / kColumns;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t base = warp % groups * kColumns, stream = warp / groups;
  if (stream >= p.streams) return;
  const Weights<kAccess, T> weights(p, base);
  const int valid = valid_columns(p, base);
  uint32_t next[4];
  load_h<kAccess, T>(p, static_cast<int>(stream) * kTokens, next);
  // The host keeps the number of tokens, plus one step, within 31 bits.
  const int step = static_cast<int>(p.streams) * kTokens, rows = static_cast<int>(p.rows);
  for (int first = static_cast<int>(stream) * kTokens; first < rows; first += step) {
    uint32_t a[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = next[e];
    load_h<kAccess, T>(p, first + step, next);
    float g[2][8];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float z[4];
      weights.multiply_h(a, weights.bias, j, z);
#pragma unroll
      for (int e = 0; e < 4; ++e) g[e / 2][2 * j + e % 2] = z[e];
    }
#pragma unroll
    for (int half_tile = 0; half_tile < 2; ++half_tile) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float z = g[half_tile][i];
        const float x = fminf(z, 0.f) - log1p_exp(z);
        const float scaled = x * p.per_normalizer;
        g[half_tile][i] = scaled < p.clamp_min ? p.clamp_min : scaled;
      }
      const int64_t row = first + lane_row() + 8 * half_tile;
      if (row < rows)
        store_results<kAccess>(static_cast<T*>(p.g) + row * p.width + base + 8 * lane_pair(),
                               g[half_tile], valid);
    }
  }
}

}  // namespace
}  // namespace gate

void gate_projection_forward(GateProjection p, int multiprocessors, cudaStream_t stream) {
  const int64_t groups = (p.width + gate::kColumns - 1) / gate::kColumns;
  const int64_t tiles = (p.rows + gate::kTokens - 1) / gate::kTokens;
  const int64_t most = int64_t{multiprocessors} * gate::kWarpsAtOnce / groups;
  p.streams = tiles < most ? tiles : (most > 0 ? most : 1);
  const auto grid = static_cast<unsigned>((p.streams * groups + gate::kWarps - 1) / gate::kWarps);
  gate::with_gate_access(p, [&](auto type, auto access) {
    using T = typename decltype(type)::type;
    gate::forward<T, decltype(access)::value><<<grid, gate::kThreads, 0, stream>>>(p);
  });
}

}  // namespace gla_ext::cuda
