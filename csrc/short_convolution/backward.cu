// Backward of the short convolution, W up to kUnrolledTaps:
//   dz_t = dy_t silu'(z_t)      dx_t = Σ_s w_{W-1-s} dz_{t+s}, within a sequence
//   dw_j = Σ_t dz_t x_{t-W+1+j}      dbias = Σ_t dz_t
// dx includes the gradient from the state after the sequence; dcache is dx of the tokens before the
// sequence.
//
// grid    a thread has four channels and several runs of tokens in sequence. z is recomputed from
//         x; the last W inputs and dz are in registers. The W - 1 dz after a run are computed by
//         this run and by the next. A block stores the dw of its runs; a second kernel adds these,
//         first block first
// reads   dy, x [B, T, D], w [D, W], bias [D], cache, dstate [N, D, W]
// writes  dx [B, T, D], dcache [N, D, W], dw [D, W], dbias [D]
// Everything in between is fp32; results are rounded once. dx of a token depends only on its
// sequence; the order of dw depends on the shape and the number of multiprocessors.
#include "cuda/device/partials.cuh"
#include "tokens.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kC = 4;             // channels of a thread
constexpr int kBlocksAtOnce = 3;  // blocks a multiprocessor
constexpr int64_t kFewestTokens = 8;

template <class T>
constexpr int kAtOnce = 8 / sizeof(T);  // tokens that a thread loads at once

// Processes the tokens from t on; `in` has the kW - 1 inputs before them. Computes their dz, with
// the dz of as many earlier tokens in `dz`; their contributions to dw and dbias; and dx of the
// tokens whose dz are then complete. kWhole: there are kAtOnce aligned tokens and as many dx, to
// which no state contributes.
template <bool kWhole, class T, int kW>
__device__ __forceinline__ void take_tokens(const Convolution& p, const Piece& piece, int64_t t,
                                            const Place<kC>& place, const float (&w)[kW][kC],
                                            const float (&bias)[kC],
                                            Vec<T, kC> (&in)[kW - 1 + kAtOnce<T>],
                                            float (&dz)[kW][kC], float (&dw)[kW + 1][kC], T* dx) {
  constexpr int kBefore = kW - 1, kSteps = kAtOnce<T>;
  const int64_t count = piece.end - t;
  Vec<T, kC> dy[kSteps];
  load_tokens<kSteps, kWhole>(in + kBefore, p, p.x, piece, t, count, place);
  load_tokens<kSteps, kWhole>(dy, p, p.dy, piece, t, count, place);
#pragma unroll
  for (int r = 0; r < kSteps; ++r) {
    float z[kC];
    preactivation(w, bias, in + r, z);
    const bool owned = kWhole || t + r < piece.to;
#pragma unroll
    for (int i = 0; i < kC; ++i) {
#pragma unroll
      for (int j = 0; j < kBefore; ++j) dz[j][i] = dz[j + 1][i];
      const float g = kWhole || r < count ? dy[r][i] * silu_slope<T>(z[i]) : 0.f;
      dz[kBefore][i] = g;
      if (!owned) continue;
#pragma unroll
      for (int j = 0; j < kW; ++j) dw[j][i] = fmaf(g, in[r + j][i], dw[j][i]);
      dw[kW][i] += g;
    }
    const int64_t first = t + r - kBefore;  // the token whose dz are complete
    if (!kWhole && (first < piece.from || first >= piece.to)) continue;
    float sum[kC] = {};
    if (!kWhole) state_gradient<T>(p, piece, first, place, sum);
#pragma unroll
    for (int i = 0; i < kC; ++i)
#pragma unroll
      for (int s = 0; s < kW; ++s) sum[i] = fmaf(w[kBefore - s][i], dz[s][i], sum[i]);
    store_vec(dx + first * p.D, sum, place.valid, kWhole || p.aligned);
  }
}

template <class T, int kW>
__global__ void __launch_bounds__(kConvThreads, kBlocksAtOnce)
    backward(const __grid_constant__ Convolution p, const ConvolutionGrid grid) {
  constexpr int kBefore = kW - 1, kSteps = kAtOnce<T>;
  const Place<kC> place(p, grid);
  float w[kW][kC], bias[kC], dw[kW + 1][kC] = {};  // last row of dw: dbias
  load_taps<kW>(p.weight, p.weight_dtype, p.aligned, place, w);
  load_bias(p, place, bias);
  const int64_t runs = place.valid > 0 ? p.B * p.runs.count : 0;

  for (int64_t run = place.row; run < runs; run += place.rows) {
    Pieces pieces(p, run);
    Piece piece;
    while (pieces.next(p, piece)) {
      Vec<T, kC> in[kBefore + kSteps];
      float dz[kW][kC] = {};  // of a token and the kW - 1 before it
#pragma unroll
      for (int i = 0; i < kBefore; ++i)
        in[i] = load_input<T>(p, piece, piece.from - kBefore + i, place);
      T* dx = static_cast<T*>(p.dx) + piece.row * p.T * p.D + place.channel;
      for (int64_t t = piece.from; t < piece.to + kBefore; t += kSteps) {
        // True if every dx that these kSteps tokens complete is inside the piece, and none is that
        // of the sequence's last W tokens, which also get the state's gradient.
        const bool inside =
            t >= piece.from + kBefore && t + kSteps <= piece.to && t + kSteps < piece.end;
        if (p.aligned && inside)
          take_tokens<true>(p, piece, t, place, w, bias, in, dz, dw, dx);
        else
          take_tokens<false>(p, piece, t, place, w, bias, in, dz, dw, dx);
#pragma unroll
        for (int i = 0; i < kBefore; ++i) in[i] = in[kSteps + i];
      }
    }
  }
  store_partials(p, grid, 0, dw);
}

// Sums the blocks' partial results into dw and dbias.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_partials(Convolution p, int64_t blocks) {
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x, width = (p.W + 1) * p.D;
  const float sum = sum_over_blocks(p.partials, blocks, width, column);
  if (threadIdx.y != 0 || column >= width) return;
  const int64_t j = column / p.D, channel = column - j * p.D;
  if (j < p.W)
    store_any(p.dweight, p.weight_dtype, channel * p.W + j, sum);
  else if (p.dbias != nullptr)
    store_any(p.dbias, p.bias_dtype, channel, sum);
}

// dz of a token of one channel; read from memory if dz is there, otherwise computed.
template <class T>
__device__ __forceinline__ float dz_of(const Convolution& p, const Piece& piece, int64_t t,
                                       int64_t channel) {
  if (p.dz != nullptr) return p.dz[(piece.row * p.T + t) * p.D + channel];
  float z = p.bias != nullptr ? load_any(p.bias, p.bias_dtype, channel) : 0.f;
  for (int64_t j = 0; j < p.W; ++j) {
    const int64_t at = t - (p.W - 1) + j;
    const T x = at >= piece.start
                    ? static_cast<const T*>(
                          p.x.data)[piece.row * p.x.stride_b + at * p.x.stride_t + channel]
                    : static_cast<const T*>(
                          p.cache)[(piece.n * p.D + channel) * p.W + p.W + at - piece.start];
    z = fmaf(load_any(p.weight, p.weight_dtype, channel * p.W + j), to_float(x), z);
  }
  const int64_t at = piece.row * p.dy.stride_b + t * p.dy.stride_t + channel;
  return to_float(static_cast<const T*>(p.dy.data)[at]) * silu_slope<T>(z);
}

// Computes dcache. The cache's first input is used by no token, the others by the first W - 1
// tokens. If a sequence is shorter than W, inputs that remain in its state also get the state's
// gradient. A thread has one channel of a sequence.
template <class T>
__global__ void __launch_bounds__(kConvThreads)
    cache_gradient(const __grid_constant__ Convolution p) {
  const int64_t all = p.N * p.D, step = int64_t{gridDim.x} * kConvThreads;
  for (int64_t k = int64_t{blockIdx.x} * kConvThreads + threadIdx.x; k < all; k += step) {
    const int64_t n = k / p.D, channel = k - n * p.D;
    const Piece piece = sequence(p, n);
    const int64_t length = piece.end - piece.start;
    const auto* dstate = static_cast<const T*>(p.dstate);
    for (int64_t i = 0; i < p.W; ++i) {
      float sum = dstate != nullptr && i >= length ? to_float(dstate[k * p.W + i - length]) : 0.f;
      for (int64_t t = 0; t < min(length, i); ++t)
        sum = fmaf(load_any(p.weight, p.weight_dtype, channel * p.W + i - 1 - t),
                   dz_of<T>(p, piece, piece.start + t, channel), sum);
      static_cast<T*>(p.dcache)[k * p.W + i] = from_float<T>(sum);
    }
  }
}

}  // namespace

TokenRuns plan_token_runs(int64_t B, int64_t T, int64_t places, int64_t fewest) {
  constexpr int64_t kMostRounds = 8;
  constexpr double kWellUsed = 0.9;
  if (B == 0 || T == 0) return {};
  const int64_t most = (T + fewest - 1) / fewest;
  int64_t best = 1;
  double best_used = 0;
  for (int64_t rounds = 1; rounds <= kMostRounds && best_used < kWellUsed; ++rounds) {
    int64_t count = places * rounds / B;
    count = count < 1 ? 1 : count > most ? most : count;
    const int64_t taken = (B * count + places - 1) / places;
    const double used = static_cast<double>(B * count) / static_cast<double>(taken * places);
    if (used > best_used) best = count, best_used = used;
    if (count == most) break;
  }
  const int64_t tokens = (T + best - 1) / best;
  return {tokens, (T + tokens - 1) / tokens};
}

ConvolutionBackwardPlan plan_convolution_backward(const Convolution& p, int multiprocessors) {
  ConvolutionBackwardPlan plan;
  const ConvolutionGrid grid = convolution_grid(p.D, kC);
  const int64_t places = grid.places(multiprocessors, kBlocksAtOnce);
  plan.runs = plan_token_runs(p.B, p.T, places, kFewestTokens);
  plan.blocks = grid.blocks(p.B * plan.runs.count, places / grid.rows()).y;
  if (p.W > kUnrolledTaps) plan.dz = p.B * p.T * p.D;
  return plan;
}

void convolution_backward(Convolution p, const ConvolutionBackwardPlan& plan, cudaStream_t stream) {
  p.runs = plan.runs;
  const ConvolutionGrid grid = convolution_grid(p.D, kC);
  if (p.runs.count > 0 && p.W > kUnrolledTaps) {
    convolution_backward_by_taps(p, plan, stream);
  } else if (p.runs.count > 0) {
    with_taps(p, [&](auto type, auto taps) {
      using T = typename decltype(type)::type;
      backward<T, decltype(taps)::value>
          <<<grid.blocks(p.B * p.runs.count, plan.blocks), kConvThreads, 0, stream>>>(p, grid);
    });
  }
  const int64_t columns = ((p.W + 1) * p.D + kSumColumns - 1) / kSumColumns;
  const int64_t parts = p.runs.count > 0 ? plan.blocks : 0;
  sum_partials<<<static_cast<unsigned>(columns), dim3(kSumColumns, kSumRows), 0, stream>>>(p,
                                                                                           parts);
  if (p.dcache == nullptr || p.N == 0) return;
  const int64_t wanted = (p.N * p.D + kConvThreads - 1) / kConvThreads;
  const auto blocks = static_cast<unsigned>(wanted < kMostRunBlocks ? wanted : kMostRunBlocks);
  with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    cache_gradient<T><<<blocks, kConvThreads, 0, stream>>>(p);
  });
}

}  // namespace gla_ext::cuda
