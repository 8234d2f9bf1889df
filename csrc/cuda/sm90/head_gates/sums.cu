// Prefix sums of the gates inside every chunk, where a head has one gate per token:
//
//   b_i = sum over s <= i of x_s      x = g log2(e) clamped at -150      x = 0 without gates
//
// grid    a warp for each (row, chunk, head), two tokens a lane
// reads   g [B, T, H]
// writes  HeadGates [B, entries, H] fp32
//
// After a reset or a strong gate, sums over a whole chunk lose digits, and so do the differences
// that decays are made of. So b is kept as a sum of two floats: the second holds what the first
// loses.
#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"
#include "head_gates.h"
#include "sums.h"

namespace gla_ext::cuda::sm90 {
namespace head_gates::sums {

constexpr int kWarps = 4;

// A sum and its rounding error.
struct Sum {
  float high = 0.f, low = 0.f;
};
// Knuth's TwoSum: high + low is exact, for terms of any size. The result is NaN only if an operand
// is NaN.
__device__ __forceinline__ Sum operator+(Sum x, Sum y) {
  const float high = __fadd_rn(x.high, y.high);
  const float of_y = __fsub_rn(high, x.high), of_x = __fsub_rn(high, of_y);
  const float lost = __fadd_rn(__fsub_rn(x.high, of_x), __fsub_rn(y.high, of_y));
  return {high, __fadd_rn(__fadd_rn(x.low, y.low), lost)};
}
__device__ __forceinline__ float exp2_of(Sum x) { return exp2_ftz(x.high + x.low); }
// 2^(to - from)
__device__ __forceinline__ float decay(Sum from, Sum to) {
  return exp2_ftz((to.high - from.high) + (to.low - from.low));
}

__device__ __forceinline__ Sum from_lane_before(Sum x, int lanes) {
  return {__shfl_up_sync(0xffffffffu, x.high, lanes), __shfl_up_sync(0xffffffffu, x.low, lanes)};
}

__global__ void __launch_bounds__(kWarps * 32) kernel(Problem p) {
  const uint32_t index = blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= static_cast<uint32_t>(p.grid.B * p.grid.entries * p.H)) return;
  const Chunk chunk = find_chunk(p, index);
  if (chunk.length == 0 || chunk.tail) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    const bool there = p.g.data != nullptr && token < chunk.length;
    const int64_t at = offset_at(p.g, chunk) + token_offset(p.g, token);
    x[i] = there ? to_log2(load_any(p.g.data, p.g.dtype, at)) : 0.f;
  }
  Sum b[2];
  b[1] = Sum{x[0]} + Sum{x[1]};
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const Sum before = from_lane_before(b[1], lanes);
    if (lane >= lanes) b[1] = before + b[1];
  }
  const Sum before = from_lane_before(b[1], 1);
  b[0] = (lane > 0 ? before : Sum{}) + Sum{x[0]};
  const Sum last{__shfl_sync(0xffffffffu, b[1].high, 31), __shfl_sync(0xffffffffu, b[1].low, 31)};
  HeadGates& out = reinterpret_cast<HeadGates*>(p.prepared)[index];
  reinterpret_cast<float4*>(out.b)[lane] = make_float4(b[0].high, b[0].low, b[1].high, b[1].low);
  reinterpret_cast<float2*>(out.from_start)[lane] =
      make_float2(p.scale * exp2_of(b[0]), p.scale * exp2_of(b[1]));
  reinterpret_cast<float2*>(out.to_end)[lane] = make_float2(decay(b[0], last), decay(b[1], last));
  if (lane < 4) out.decay[lane] = exp2_of(last);
}

}  // namespace head_gates::sums

void launch_head_gate_sums(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = blocks_of(chunk_heads(p), int64_t{head_gates::sums::kWarps});
  launch(head_gates::sums::kernel, blocks, head_gates::sums::kWarps * 32, p, stream);
}

}  // namespace gla_ext::cuda::sm90
