// Forward of the short convolution, W up to kUnrolledTaps; w_j is the tap of the input W - 1 - j
// tokens earlier:
//   z_t = bias + Σ_j w_j x_{t-W+1+j}      y_t = silu(z_t)
//
// grid    a thread has 16 bytes of neighbouring channels and several runs of tokens in sequence,
//         whose last W inputs it keeps in registers; after these runs it writes the states of
//         sequences
// reads   x [B, T, D], w [D, W], bias [D], cache [N, D, W]
// writes  y [B, T, D], state [N, D, W]
// z is fp32; y is rounded once. A token's bits depend only on its W inputs.
#include "tokens.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kAtOnce = 4;        // tokens that a thread loads at once
constexpr int kBlocksAtOnce = 4;  // blocks a multiprocessor

template <class T>
constexpr int kChannels = 16 / sizeof(T);  // of a thread

// Computes y of `count` tokens, at most kAtOnce, from t on; `in` has the kW - 1 inputs before them.
// kWhole: there are kAtOnce tokens, and they are aligned.
template <bool kWhole, class T, int kW, int kC>
__device__ __forceinline__ void take_tokens(const Convolution& p, const Piece& piece, int64_t t,
                                            int64_t count, const Place<kC>& place,
                                            const float (&w)[kW][kC], const float (&bias)[kC],
                                            Vec<T, kC> (&in)[kW - 1 + kAtOnce], T* y) {
  load_tokens<kAtOnce, kWhole>(in + kW - 1, p, p.x, piece, t, count, place);
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) {
    if (!kWhole && r >= count) break;
    float z[kC];
    preactivation(w, bias, in + r, z);
#pragma unroll
    for (int i = 0; i < kC; ++i) z[i] = silu<T>(z[i]);
    store_vec(y + r * p.D, z, place.valid, kWhole || p.aligned);
  }
}

template <class T, int kW>
__global__ void __launch_bounds__(kConvThreads, kBlocksAtOnce)
    forward(const __grid_constant__ Convolution p, const ConvolutionGrid grid) {
  constexpr int kC = kChannels<T>, kBefore = kW - 1;
  const Place<kC> place(p, grid);
  if (place.valid == 0) return;
  float w[kW][kC], bias[kC];
  load_taps<kW>(p.weight, p.weight_dtype, p.aligned, place, w);
  load_bias(p, place, bias);
  const int64_t runs = p.B * p.runs.count, all = runs + (p.state != nullptr ? p.N : 0);

  for (int64_t run = place.row; run < all; run += place.rows) {
    if (run >= runs) {
      store_state<kW, T>(p, run - runs, place);
      continue;
    }
    Pieces pieces(p, run);
    Piece piece;
    while (pieces.next(p, piece)) {
      Vec<T, kC> in[kBefore + kAtOnce];
#pragma unroll
      for (int i = 0; i < kBefore; ++i)
        in[i] = load_input<T>(p, piece, piece.from - kBefore + i, place);
      for (int64_t t = piece.from; t < piece.to; t += kAtOnce) {
        const int64_t count = piece.to - t;
        T* y = static_cast<T*>(p.y) + (piece.row * p.T + t) * p.D + place.channel;
        if (p.aligned && count >= kAtOnce)
          take_tokens<true>(p, piece, t, count, place, w, bias, in, y);
        else
          take_tokens<false>(p, piece, t, count, place, w, bias, in, y);
#pragma unroll
        for (int i = 0; i < kBefore; ++i) in[i] = in[kAtOnce + i];
      }
    }
  }
}

}  // namespace

void convolution_forward(Convolution p, int multiprocessors, cudaStream_t stream) {
  if (p.W > kUnrolledTaps) return convolution_forward_by_taps(p, multiprocessors, stream);
  with_taps(p, [&](auto type, auto taps) {
    using T = typename decltype(type)::type;
    const ConvolutionGrid grid = convolution_grid(p.D, kChannels<T>);
    p.runs = plan_token_runs(p.B, p.T, grid.places(multiprocessors, kBlocksAtOnce), kAtOnce);
    const int64_t runs = p.B * p.runs.count + (p.state != nullptr ? p.N : 0);
    forward<T, decltype(taps)::value>
        <<<grid.blocks(runs, kMostRunBlocks), kConvThreads, 0, stream>>>(p, grid);
  });
}

}  // namespace gla_ext::cuda
