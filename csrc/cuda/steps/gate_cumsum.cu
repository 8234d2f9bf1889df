// Step 1: b_i = sum over s <= i of x_s inside a chunk, x = g log2(e) clamped at -150.
//
// grid    (row, chunk, head, block of 64 channels); a thread has one token, 8 channels at a time
// reads   g [B, T, H, K]
// writes  b [B, T, H, K] fp32; if requested, b_suffix [B, T, H, K] fp32, the sum of x after a
//         token; tiers [B, entries, H, blocks], where b of a block leaves tier 1's range
// Sums are fp32, in the order of CUB's block scan.
#include <cub/block/block_scan.cuh>

#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kChannels = 8;
constexpr int kPitchX = kTierBlock + 4;
constexpr int kScanThreads = kChunk;

struct Channels {
  float x[kChannels];
};
struct Sum {
  __device__ __forceinline__ Channels operator()(const Channels& a, const Channels& b) const {
    Channels sum;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sum.x[i] = a.x[i] + b.x[i];
    return sum;
  }
};
using Scan = cub::BlockScan<Channels, kScanThreads, cub::BLOCK_SCAN_WARP_SCANS>;

__device__ __forceinline__ Channels load_channels(const float* row) {
  Channels c;
#pragma unroll
  for (int i = 0; i < kChannels; i += 4)
    *reinterpret_cast<float4*>(c.x + i) = *reinterpret_cast<const float4*>(row + i);
  return c;
}
__device__ __forceinline__ void store_channels(float* row, const Channels& c) {
#pragma unroll
  for (int i = 0; i < kChannels; i += 4)
    *reinterpret_cast<float4*>(row + i) = *reinterpret_cast<const float4*>(c.x + i);
}

// Calls f(pass, token, column) for every eight channels of the block that this thread copies.
template <class F>
__device__ __forceinline__ void for_rows(F&& f) {
  constexpr int kEights = kTierBlock / 8;
#pragma unroll
  for (int i = 0; i < kChunk * kEights / kScanThreads; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kScanThreads;
    f(i, at / kEights, at % kEights * 8);
  }
}

template <Access kAccess>
__device__ __forceinline__ void store_block(const float (*s_x)[kPitchX], const Rows& out,
                                            const Chunk& chunk, int first, int channels) {
  float* base = rows_at<float>(out, chunk);
  for_rows([&](int, int token, int column) {
    if (token >= chunk.length) return;
    float* row = base + token_offset(out, token) + first + column;
    const int valid = channels - first - column;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      if constexpr (kAccess == Access::kFast) {
        if (valid > 0)
          *reinterpret_cast<float4*>(row + i) =
              *reinterpret_cast<const float4*>(&s_x[token][column + i]);
      } else {
#pragma unroll
        for (int j = i; j < i + 4; ++j)
          if (j < valid) row[j] = s_x[token][column + j];
      }
    }
  });
}

}  // namespace

namespace steps {

template <Access kAccess, class Gate>
__global__ void __launch_bounds__(kScanThreads) gate_cumsum(Problem p) {
  __shared__ typename Scan::TempStorage storage;
  __shared__ __align__(16) float s_x[kChunk][kPitchX];  // x, then b, then b_suffix
  const int blocks = blocks_of(p.K, kTierBlock);
  const int block = static_cast<int>(blockIdx.x % blocks);
  const Chunk chunk = find_chunk(p, blockIdx.x / blocks);
  if (chunk.length == 0) return;
  const int first = block * kTierBlock, token = static_cast<int>(threadIdx.x);
  if (chunk.tail) {
    write_zeros<kScanThreads>(p.b, chunk, first, min(first + kTierBlock, p.K));
    return;
  }
  const Gate* gates = rows_at<const Gate>(p.g, chunk);
  const auto load_block = [&] {
    for_rows([&](int, int row, int column) {
      const auto g = load_row<kAccess>(gates, p.g, row, chunk.length, first + column, p.K);
      Channels x;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) x.x[i] = to_log2(g[i]);
      store_channels(&s_x[row][column], x);
    });
  };
  load_block();
  __syncthreads();  // s_x is written
  bool out = false;
#pragma unroll 1
  for (int column = 0; column < kTierBlock && first + column < p.K; column += kChannels) {
    Channels b, b_last;
    Scan(storage).InclusiveScan(load_channels(&s_x[token][column]), b, Sum{}, b_last);
#pragma unroll
    for (int i = 0; i < kChannels; ++i)
      out |= p.past_alone ? out_of_past_tier1(b.x[i]) : out_of_tier1(b.x[i], b_last.x[i]);
    store_channels(&s_x[token][column], b);
    __syncthreads();  // before the storage is used again
  }
  store_block<kAccess>(s_x, p.b, chunk, first, p.K);
  if (p.tiers != nullptr) {
    int rows = __syncthreads_or(out) ? kChunk : 0;
    if (p.past_alone && rows > 0)
      rows = largest_of_block(out ? static_cast<int>(kChunk) - token : 0);
    if (token == 0) p.tiers[chunk.entry * kMaxTierBlocks + block] = static_cast<uint8_t>(rows);
  }
  if (p.b_suffix.data == nullptr) return;

  // The suffix sums: the same scan from the other end, where thread i has token 63 - i.
  const int mirrored = kScanThreads - 1 - token;
  __syncthreads();  // b is stored
  load_block();
  __syncthreads();  // s_x is written
#pragma unroll 1
  for (int column = 0; column < kTierBlock && first + column < p.K; column += kChannels) {
    Channels suffix, none;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) none.x[i] = 0;
    Scan(storage).ExclusiveScan(load_channels(&s_x[mirrored][column]), suffix, none, Sum{});
    store_channels(&s_x[mirrored][column], suffix);
    __syncthreads();  // before the storage is used again
  }
  store_block<kAccess>(s_x, p.b_suffix, chunk, first, p.K);
}

// Computes the flags for steps that get b as an input. At the very limit of the range, the last b
// may differ from the scan's by a rounding error; within a call all kernels read the same flags.
__global__ void __launch_bounds__(kThreads) chunk_tiers(Problem p) {
  const int blocks = blocks_of(p.K, kTierBlock);
  const int block = static_cast<int>(blockIdx.x % blocks);
  const Chunk chunk = find_chunk(p, blockIdx.x / blocks);
  if (chunk.length == 0 || chunk.tail) return;
  const float* b = rows_at<const float>(p.b, chunk);
  bool out = false;
  for_eights<kTile, kTierBlock>([&](int, int row, int column) {
    column += block * kTierBlock;
    const auto x = load_row<Access::kGeneral>(b, p.b, row, chunk.length, column, p.K);
    const auto last =
        load_row<Access::kGeneral>(b, p.b, chunk.length - 1, chunk.length, column, p.K);
#pragma unroll
    for (int i = 0; i < 8; ++i) out |= row < chunk.length && out_of_tier1(x[i], last[i]);
  });
  const bool any_out = __syncthreads_or(out);
  if (threadIdx.x == 0) p.tiers[chunk.entry * kMaxTierBlocks + block] = any_out ? kChunk : 0;
}

}  // namespace steps

void launch_gate_cumsum(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = chunk_heads(p) * blocks_of(p.K, kTierBlock);
  const bool fast = p.K % 8 == 0 && p.g.aligned && p.b.aligned &&
                    (p.b_suffix.data == nullptr || p.b_suffix.aligned);
  with_dtype(p.g.dtype, [&](auto type) {
    using Gate = typename decltype(type)::type;
    if (fast)
      launch(steps::gate_cumsum<Access::kFast, Gate>, blocks, kScanThreads, p, stream);
    else
      launch(steps::gate_cumsum<Access::kGeneral, Gate>, blocks, kScanThreads, p, stream);
  });
}

void launch_chunk_tiers(const Problem& p, cudaStream_t stream) {
  launch(steps::chunk_tiers, chunk_heads(p) * blocks_of(p.K, kTierBlock), kThreads, p, stream);
}

}  // namespace gla_ext::cuda
