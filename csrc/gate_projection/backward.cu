// Backward of the gate's projection. z = h Wᵀ + b is recomputed; dz = dg σ(−z) / τ, or 0 where g is
// clamped:
//   dh = dz W      dW = Σ dzᵀ h      db = Σ dz
//
// grid    x: streams of blocks, each with every streams-th tile of 32 tokens; y: 512 columns, of
//         which a warp has 32. dh is summed over the warps of a block through shared memory; dW and
//         db stay in registers to the end
// reads   dg [rows, K], h [rows, R], R up to 16, W [K, R], b [K]
// writes  dh [rows, R], or parts of it if columns need several blocks; parts of dW and db, which a
//         second kernel adds, first stream first
// Products of bf16 or fp16 (dz is rounded to that) are accumulated in fp32; everything else is
// fp32. The order of every sum depends only on the shape and the GPU.
#include "cuda/device/capability.h"
#include "cuda/device/partials.cuh"
#include "fragments.cuh"

namespace gla_ext::cuda {
namespace gate {
namespace {

constexpr int kWarps = static_cast<int>(kGateBlockColumns) / kColumns;  // of a block, at most
constexpr int kThreads = 32 * kWarps;
// Products of 16 tokens that a tile takes in sequence. With two of them registers would spill from
// compute capability 10.0 on.
constexpr int kProducts = kMajor >= 10 ? 1 : 2;
constexpr int kTileTokens = kProducts * kTokens;
constexpr int kRank = static_cast<int>(kMostGateRank);

// σ(−z) of two numbers, by one reciprocal; NaN stays NaN.
__device__ __forceinline__ void sigmoid_of_minus(float z0, float z1, float& s0, float& s1) {
  constexpr float kMost = 40.f;  // σ(−40) is below the rounding error of a gradient
  const float below0 = 1.f + exp2_ftz((z0 > kMost ? kMost : z0) * kLog2E);
  const float below1 = 1.f + exp2_ftz((z1 > kMost ? kMost : z1) * kLog2E);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(below0 * below1));
  s0 = r * below1;
  s1 = r * below0;
}

// A warp's sums over all tokens.
struct Sums {
  float dweight[2][2][4];  // [16 columns][ranks 0 to 7, 8 to 15]
  float dbias[8];

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int i = 0; i < 16; ++i) dweight[i / 8][i / 4 % 2][i % 4] = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) dbias[i] = 0.f;
  }

  // Adds dzᵀ h of 16 tokens and the columns of two tiles, 2 s and 2 s + 1.
  template <class T>
  __device__ __forceinline__ void add(int s, const uint32_t (&dz)[2][2], const uint32_t (&h)[4]) {
    const uint32_t a[4] = {transposed(dz[0][0]), transposed(dz[1][0]), transposed(dz[0][1]),
                           transposed(dz[1][1])};
#pragma unroll
    for (int n = 0; n < 2; ++n)
      multiply<T>(dweight[s][n], a, transposed(h[2 * n]), transposed(h[2 * n + 1]));
  }

  __device__ __forceinline__ void store(const GateProjection& p, int64_t base) {
    float* parts = p.parts + blockIdx.x * (p.width * (p.rank + 1));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int s = i / 8, n = i / 4 % 2, e = i % 4;
      const int64_t column = base + column_of(2 * s + e / 2, lane_row());
      const int r = 8 * n + 2 * lane_pair() + e % 2;
      if (column < p.width && r < p.rank) parts[column * p.rank + r] = dweight[s][n][e];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = dbias[i];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      const int64_t column = base + 8 * lane_pair() + i;
      if (lane_row() == 0 && column < p.width) parts[p.width * p.rank + column] = sum;
    }
  }
};

// Loads dg of this lane's columns for tokens first + i and first + i + 8.
template <Access kAccess, class T>
__device__ __forceinline__ void load_dg(const GateProjection& p, int first, int base, int valid,
                                        Eight<T> (&dg)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = first + lane_row() + 8 * e;
    dg[e] = load8<kAccess>(
        static_cast<const T*>(p.dg) + int64_t{row} * p.dg_stride + base + 8 * lane_pair(),
        row < static_cast<int>(p.rows) ? valid : 0);
  }
}

// Computes dz of 16 tokens and the columns of tile j, rounded, and adds it to the sums over tokens.
template <class T>
__device__ __forceinline__ void make_dz(const GateProjection& p, int j, const float (&z)[4],
                                        const Eight<T> (&dg)[2], float (&dbias)[8],
                                        uint32_t (&dz)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float d[2];
    sigmoid_of_minus(z[2 * e], z[2 * e + 1], d[0], d[1]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      d[k] *= dg[e][2 * j + k] * p.per_normalizer;
      if (z[2 * e + k] < p.clamp_z) d[k] = 0.f;
      dbias[2 * j + k] += d[k];
    }
    dz[e] = rounded_pair<T>(d[0], d[1]);
  }
}

// Sums the warps' parts of dh for the tile at `first`.
template <class T>
__device__ __forceinline__ void sum_dh(const GateProjection& p, int64_t first,
                                       const float (*s_dh)[kTileTokens][kRank]) {
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int i = threadIdx.x; i < kTileTokens * kRank; i += blockDim.x) {
    const int token = i / kRank, r = i % kRank;
    float sum = 0.f;
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) sum += s_dh[warp][token][r];
    const int64_t row = first + token;
    if (row >= p.rows || r >= p.rank) continue;
    if (p.dh_parts != nullptr)
      p.dh_parts[(blockIdx.y * p.rows + row) * p.rank + r] = sum;
    else
      static_cast<T*>(p.dh)[row * p.rank + r] = from_float<T>(sum);
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads, 1) backward(const __grid_constant__ GateProjection p) {
  __shared__ float s_dh[kWarps][kTileTokens][kRank], s_bias[kWarps][kColumns];
  const int warp = threadIdx.x / 32;
  const int base = static_cast<int>(blockIdx.y * kGateBlockColumns) + warp * kColumns;
  const int valid = valid_columns(p, base);
  const Weights<kAccess, T> weights(p, base);
  // Moved out of the registers, which are too few; a lane reads only what it has written.
  float* bias = s_bias[warp] + 8 * lane_pair();
#pragma unroll
  for (int i = 0; i < 8; ++i) bias[i] = weights.bias[i];
  Sums sums;
  uint32_t h[kProducts][4];
  Eight<T> dg[kProducts][2];
  const auto load = [&](int first, int m) {
    load_h<kAccess, T>(p, first + m * kTokens, h[m]);
    load_dg<kAccess, T>(p, first + m * kTokens, base, valid, dg[m]);
  };
  // The host keeps the number of tokens, plus one step, within 31 bits.
  const int step = static_cast<int>(p.streams) * kTileTokens, rows = static_cast<int>(p.rows);
  int first = static_cast<int>(blockIdx.x) * kTileTokens;
#pragma unroll
  for (int m = 0; m < kProducts; ++m) load(first, m);
  for (; first < rows; first += step) {
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      float dh[2][4] = {};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t dz[2][2];  // [tile 2 s or 2 s + 1][token i or i + 8]
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          float z[4];
          weights.multiply_h(h[m], bias, 2 * s + q, z);
          make_dz(p, 2 * s + q, z, dg[m], sums.dbias, dz[q]);
        }
        sums.add<T>(s, dz, h[m]);
        const uint32_t a[4] = {dz[0][0], dz[0][1], dz[1][0], dz[1][1]};
#pragma unroll
        for (int n = 0; n < 2; ++n)  // of W, whose columns are summed over here
          multiply<T>(dh[n], a, transposed(weights.b[2 * s][n]),
                      transposed(weights.b[2 * s + 1][n]));
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *reinterpret_cast<float2*>(
              &s_dh[warp][m * kTokens + lane_row() + 8 * e][8 * n + 2 * lane_pair()]) =
              make_float2(dh[n][2 * e], dh[n][2 * e + 1]);
      load(first + step, m);          // of the next tile, in their place
      asm volatile("" ::: "memory");  // one product at a time: registers are too few for both
    }
    __syncthreads();  // s_dh is written
    sum_dh<T>(p, first, s_dh);
    __syncthreads();  // s_dh is read before the next tile's is written
  }
  sums.store(p, base);
}

// Sums the streams' partial results into dweight and dbias.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_parts(const __grid_constant__ GateProjection p) {
  const int64_t of_weight = p.width * p.rank, all = of_weight + p.width;
  const int64_t i = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  const float sum = sum_over_blocks(p.parts, p.streams, all, i);
  if (threadIdx.y != 0 || i >= all) return;
  if (i < of_weight)
    store_any(p.dweight, p.dtype, i, sum);
  else if (p.dbias != nullptr)
    store_any(p.dbias, p.dtype, i - of_weight, sum);
}

// Sums the partial results of the blocks of columns into dh.
__global__ void __launch_bounds__(256) sum_dh_parts(const __grid_constant__ GateProjection p) {
  const int64_t count = p.rows * p.rank, blocks = gate_column_blocks(p.width);
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * 256) {
    float sum = 0.f;
    for (int64_t block = 0; block < blocks; ++block) sum += p.dh_parts[block * count + i];
    store_any(p.dh, p.dtype, i, sum);
  }
}

}  // namespace
}  // namespace gate

int64_t gate_projection_streams(const GateProjection& p, int multiprocessors) {
  const int64_t tiles = (p.rows + gate::kTileTokens - 1) / gate::kTileTokens;
  // Small blocks with few columns share a multiprocessor.
  const int64_t columns = p.width < kGateBlockColumns ? p.width : kGateBlockColumns;
  const int64_t at_once = columns <= kGateBlockColumns / 4   ? 4
                          : columns <= kGateBlockColumns / 2 ? 2
                                                             : 1;
  const int64_t most = at_once * multiprocessors / gate_column_blocks(p.width);
  return tiles < most ? tiles : (most > 0 ? most : 1);
}

void gate_projection_backward(const GateProjection& p, cudaStream_t stream) {
  const int64_t columns = p.width < kGateBlockColumns ? p.width : kGateBlockColumns;
  const auto threads = static_cast<unsigned>((columns + gate::kColumns - 1) / gate::kColumns * 32);
  const dim3 grid(static_cast<unsigned>(p.streams),
                  static_cast<unsigned>(gate_column_blocks(p.width)));
  gate::with_gate_access(p, [&](auto type, auto access) {
    using T = typename decltype(type)::type;
    gate::backward<T, decltype(access)::value><<<grid, threads, 0, stream>>>(p);
  });
  const int64_t sums = p.width * (p.rank + 1);
  gate::sum_parts<<<static_cast<unsigned>((sums + kSumColumns - 1) / kSumColumns),
                    dim3(kSumColumns, kSumRows), 0, stream>>>(p);
  if (p.dh_parts == nullptr) return;
  const int64_t blocks = (p.rows * p.rank + 255) / 256;
  gate::sum_dh_parts<<<static_cast<unsigned>(blocks < 4096 ? blocks : 4096), 256, 0, stream>>>(p);
}

}  // namespace gla_ext::cuda
