// Adds A v of strong chunks, or of their strong rows, which the sweeps that gate leave out: o += A
// v.
//
// grid    that of for_strong_chunks
// reads   q, k, g [B, T, H, K], v, o [B, T, H, V], tiers
// writes  o [B, T, H, V], and, for backward, A of prepared chunks
// A comes from forward steps 3 and 4 and stays in shared memory. Accumulation is fp32; o is rounded
// a second time.
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "intra.cuh"

namespace gla_ext::cuda::sm90 {
namespace strong::output {

union Shared {
  StrongScores scores;
  struct {
    bf16 A[kTile * StrongScores::kPitchX];  // A as `scores` has left it
    bf16 v[kTile * StrongScores::kPitchX];  // [token][V]
  } operands;
};

// kForBackward: also stores A to the prepared chunk.
template <bool kForBackward>
__global__ void __launch_bounds__(kThreads, 2) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  constexpr int kPitchX = StrongScores::kPitchX;
  __shared__ __align__(16) Shared s;
  __shared__ Chunk chunk;
  for_strong_chunks(p, chunk, [&] {
    s.scores.make(p, chunk);
    if constexpr (kForBackward) write_prepared_A(p, chunk, s.scores.A);
    const WarpTile<kTile> warp;
    const int first_row = first_strong_row(p, chunk);
    bf16* o = rows_at<bf16>(p.o, chunk);
    for (int first_v = 0; first_v < p.V; first_v += kTile) {
      TileRows<Access::kFast, bf16, kTile> v;
      v.load(rows_at<const bf16>(p.v, chunk), p.v, chunk.length, first_v, p.V);
      if (first_v > 0) __syncthreads();  // the previous values are read
      v.store(s.operands.v, false);
      float acc[2][2][4];  // [token, V]
      clear(acc);
      // Loads all of o before any of it is stored; otherwise the loads would wait for the stores.
      float2 before[8];
      const auto for_tokens = [&](auto&& f) {
        int pair = 0;
        for_pairs(acc, [&](int r, int c, float x0, float x1) {
          const int token = warp.m + r, column = first_v + warp.n + c;
          float2& x = before[pair++];
          if (token >= first_row && token < chunk.length)
            f(o + token_offset(p.o, token) + column, p.V - column, x, x0, x1);
        });
      };
      for_tokens([&](bf16* at, int valid, float2& x, float, float) {
        x = load2<Access::kFast>(at, valid);
      });
      __syncthreads();  // the values are written
      cuda::product<Stored::kAsIs, Stored::kAsIs, kPitchX, kPitchX>(
          acc, s.operands.A + warp.m * kPitchX, s.operands.v + warp.n, kTile, false);
      for_tokens([&](bf16* at, int valid, const float2& x, float x0, float x1) {
        store2<Access::kFast>(at, x.x + x0, x.y + x1, valid);
      });
    }
  });
#endif
}

}  // namespace strong::output

void launch_strong_output(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = strong_grid(p, 1);
  if (blocks > 0) launch_dependent(strong::output::kernel<false>, blocks, kThreads, 0, stream, p);
}

void launch_strong_output_for_backward(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = strong_grid(p, 1);
  if (blocks > 0) launch_dependent(strong::output::kernel<true>, blocks, kThreads, 0, stream, p);
}

}  // namespace gla_ext::cuda::sm90
