// The short convolution for W above kUnrolledTaps, one tap at a time over a few tokens:
//   z_t = bias + Σ_j w_j x_{t-W+1+j}      y_t = silu(z_t)      dz_t = dy_t silu'(z_t)
//   dx_t = Σ_s w_{W-1-s} dz_{t+s}      dw_j = Σ_t dz_t x_{t-W+1+j}      dbias = Σ_t dz_t
//
// grid    that of forward.cu and backward.cu; for dw, z is a tap or the bias. Only the first tap
//         that needs a row reads it from memory, the others read it from the caches
// reads   dy, x [B, T, D], w [D, W], bias [D], cache, dstate [N, D, W]
// writes  y [B, T, D], state [N, D, W]; dz [B, T, D] fp32, dx [B, T, D], partial sums of dw and
//         dbias
// Precision and order of the sums are those of forward.cu and backward.cu.
#include "tokens.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kC = 4;       // channels of a thread
constexpr int kTokens = 8;  // tokens for which a tap is loaded
constexpr int kBlocksAtOnce = 4;
constexpr int64_t kMostTaps = 65535;  // of a grid, in z

// Loads tap j of the channels of a thread.
__device__ __forceinline__ void load_tap(const Convolution& p, int64_t j, const Place<kC>& place,
                                         float (&w)[kC]) {
#pragma unroll
  for (int i = 0; i < kC; ++i)
    w[i] =
        i < place.valid ? load_any(p.weight, p.weight_dtype, (place.channel + i) * p.W + j) : 0.f;
}

// Calls f(piece, t) for every kTokens-th token of a thread's runs.
template <class F>
__device__ __forceinline__ void for_tokens(const Convolution& p, int64_t run, F&& f) {
  Pieces pieces(p, run);
  Piece piece;
  while (pieces.next(p, piece))
    for (int64_t t = piece.from; t < piece.to; t += kTokens) f(piece, t);
}

// Computes y, or for backward dz.
template <class T, bool kBackward>
__global__ void __launch_bounds__(kConvThreads, kBlocksAtOnce)
    forward(const __grid_constant__ Convolution p, const ConvolutionGrid grid) {
  const Place<kC> place(p, grid);
  if (place.valid == 0) return;
  float bias[kC];
  load_bias(p, place, bias);
  const int64_t runs = p.B * p.runs.count;
  const int64_t all = runs + (!kBackward && p.state != nullptr ? p.N : 0);
  for (int64_t run = place.row; run < all; run += place.rows) {
    if (run >= runs) {
      store_state<0, T>(p, run - runs, place);
      continue;
    }
    for_tokens(p, run, [&](const Piece& piece, int64_t t) {
      float z[kTokens][kC];
#pragma unroll
      for (int r = 0; r < kTokens; ++r)
#pragma unroll
        for (int i = 0; i < kC; ++i) z[r][i] = bias[i];
      for (int64_t j = 0; j < p.W; ++j) {
        float w[kC];
        load_tap(p, j, place, w);
#pragma unroll
        for (int r = 0; r < kTokens; ++r) {
          if (t + r >= piece.to) break;
          const Vec<T, kC> x = load_input<T>(p, piece, t + r - (p.W - 1) + j, place);
#pragma unroll
          for (int i = 0; i < kC; ++i) z[r][i] = fmaf(w[i], x[i], z[r][i]);
        }
      }
      const int64_t first = (piece.row * p.T + t) * p.D + place.channel;
#pragma unroll
      for (int r = 0; r < kTokens; ++r) {
        if (t + r >= piece.to) break;
        if constexpr (kBackward) {
          const Vec<T, kC> dy = load_row(p, row_of<T>(p.dy, piece.row, t + r, place), place);
#pragma unroll
          for (int i = 0; i < kC; ++i) z[r][i] = dy[i] * silu_slope<T>(z[r][i]);
          store_vec(p.dz + first + r * p.D, z[r], place.valid, p.aligned);
        } else {
#pragma unroll
          for (int i = 0; i < kC; ++i) z[r][i] = silu<T>(z[r][i]);
          store_vec(static_cast<T*>(p.y) + first + r * p.D, z[r], place.valid, p.aligned);
        }
      }
    });
  }
}

__device__ __forceinline__ Vec<float, kC> load_dz(const Convolution& p, const Piece& piece,
                                                  int64_t t, const Place<kC>& place) {
  return load_row(p, p.dz + (piece.row * p.T + t) * p.D + place.channel, place);
}

template <class T>
__global__ void __launch_bounds__(kConvThreads, kBlocksAtOnce)
    input_gradient(const __grid_constant__ Convolution p, const ConvolutionGrid grid) {
  const Place<kC> place(p, grid);
  if (place.valid == 0) return;
  const int64_t runs = p.B * p.runs.count;
  for (int64_t run = place.row; run < runs; run += place.rows) {
    for_tokens(p, run, [&](const Piece& piece, int64_t t) {
      float sum[kTokens][kC];
#pragma unroll
      for (int r = 0; r < kTokens; ++r)
        if (t + r < piece.to) state_gradient<T>(p, piece, t + r, place, sum[r]);
      for (int64_t s = 0; s < p.W; ++s) {
        float w[kC];
        load_tap(p, p.W - 1 - s, place, w);
#pragma unroll
        for (int r = 0; r < kTokens; ++r) {
          if (t + r >= piece.to || t + r + s >= piece.end) break;
          const Vec<float, kC> dz = load_dz(p, piece, t + r + s, place);
#pragma unroll
          for (int i = 0; i < kC; ++i) sum[r][i] = fmaf(w[i], dz[i], sum[r][i]);
        }
      }
      T* dx = static_cast<T*>(p.dx) + (piece.row * p.T + t) * p.D + place.channel;
#pragma unroll
      for (int r = 0; r < kTokens; ++r)
        if (t + r < piece.to) store_vec(dx + r * p.D, sum[r], place.valid, p.aligned);
    });
  }
}

template <class T>
__global__ void __launch_bounds__(kConvThreads, kBlocksAtOnce)
    weight_gradient(const __grid_constant__ Convolution p, const ConvolutionGrid grid) {
  const Place<kC> place(p, grid);
  const int64_t runs = place.valid > 0 ? p.B * p.runs.count : 0;
  for (int64_t j = blockIdx.z; j <= p.W; j += gridDim.z) {
    float sum[1][kC] = {};
    for (int64_t run = place.row; run < runs; run += place.rows) {
      for_tokens(p, run, [&](const Piece& piece, int64_t t) {
#pragma unroll
        for (int r = 0; r < kTokens; ++r) {
          if (t + r >= piece.to) break;
          const Vec<float, kC> dz = load_dz(p, piece, t + r, place);
          if (j == p.W) {
#pragma unroll
            for (int i = 0; i < kC; ++i) sum[0][i] += dz[i];
            continue;
          }
          const Vec<T, kC> x = load_input<T>(p, piece, t + r - (p.W - 1) + j, place);
#pragma unroll
          for (int i = 0; i < kC; ++i) sum[0][i] = fmaf(dz[i], x[i], sum[0][i]);
        }
      });
    }
    store_partials(p, grid, j, sum);
  }
}

}  // namespace

void convolution_forward_by_taps(Convolution p, int multiprocessors, cudaStream_t stream) {
  const ConvolutionGrid grid = convolution_grid(p.D, kC);
  p.runs = plan_token_runs(p.B, p.T, grid.places(multiprocessors, kBlocksAtOnce), kTokens);
  const int64_t runs = p.B * p.runs.count + (p.state != nullptr ? p.N : 0);
  with_dtype(p.dtype, [&](auto type) {
    forward<typename decltype(type)::type, false>
        <<<grid.blocks(runs, kMostRunBlocks), kConvThreads, 0, stream>>>(p, grid);
  });
}

void convolution_backward_by_taps(const Convolution& p, const ConvolutionBackwardPlan& plan,
                                  cudaStream_t stream) {
  const ConvolutionGrid grid = convolution_grid(p.D, kC);
  const int64_t runs = p.B * p.runs.count;
  const dim3 many = grid.blocks(runs, kMostRunBlocks);
  dim3 summing = grid.blocks(runs, plan.blocks);
  summing.z = static_cast<unsigned>(p.W < kMostTaps ? p.W + 1 : kMostTaps);
  with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    forward<T, true><<<many, kConvThreads, 0, stream>>>(p, grid);
    input_gradient<T><<<many, kConvThreads, 0, stream>>>(p, grid);
    weight_gradient<T><<<summing, kConvThreads, 0, stream>>>(p, grid);
  });
}

}  // namespace gla_ext::cuda
