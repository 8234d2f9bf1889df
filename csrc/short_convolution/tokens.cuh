// Which channels and tokens a thread has, where sequences start and end, and the inputs before a
// token.
#pragma once

#include "cuda/device/activation.cuh"
#include "cuda/device/indices.cuh"
#include "cuda/device/vec.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda {

constexpr int kConvThreads = 128;
constexpr int64_t kMostRunBlocks = 65535;  // of a grid, in y

// A block has `lanes` neighbouring vectors of channels. For each vector it takes as many runs at a
// time as it has rows of threads. grid x selects the vector of the first lane, grid y the run of
// the first row.
struct ConvolutionGrid {
  int lanes = 1;
  int64_t tiles = 1;

  __host__ __device__ int rows() const { return kConvThreads / lanes; }
  // The number of runs in progress at a time, with `blocks_at_once` blocks a multiprocessor.
  int64_t places(int multiprocessors, int blocks_at_once) const {
    const int64_t blocks = int64_t{multiprocessors} * blocks_at_once / tiles;
    return (blocks > 0 ? blocks : 1) * rows();
  }
  dim3 blocks(int64_t runs, int64_t most) const {
    const int64_t wanted = runs > 0 ? (runs + rows() - 1) / rows() : 1;
    return dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(wanted < most ? wanted : most));
  }
};
// Chooses a warp's width, or a smaller width if that leaves fewer threads idle.
inline ConvolutionGrid convolution_grid(int64_t D, int channels) {
  const int64_t vectors = (D + channels - 1) / channels;
  ConvolutionGrid grid{32, (vectors + 31) / 32};
  for (int lanes = 16; lanes >= 4; lanes /= 2) {
    const int64_t tiles = (vectors + lanes - 1) / lanes;
    if (tiles * lanes < grid.tiles * grid.lanes) grid = {lanes, tiles};
  }
  return grid;
}

template <int kC>
struct Place {
  int64_t channel, row, rows;  // first channel; first run, runs taken at a time
  int valid;                   // number of channels that exist

  __device__ __forceinline__ Place(const Convolution& p, const ConvolutionGrid& grid)
      : channel((int64_t{blockIdx.x} * grid.lanes + threadIdx.x % grid.lanes) * kC),
        row(int64_t{blockIdx.y} * grid.rows() + threadIdx.x / grid.lanes),
        rows(int64_t{gridDim.y} * grid.rows()),
        valid(static_cast<int>(clamp(p.D - channel, 0, kC))) {}
};

// Some tokens of one sequence. The whole sequence is [start, end).
struct Piece {
  int64_t row, n;      // batch row; index of cache and state, -1: none
  int64_t start, end;  // tokens of the sequence
  int64_t from, to;    // tokens of the piece
};

// Sequence n. Wrong offsets are clamped, so that they never lead outside a tensor.
__device__ __forceinline__ Piece sequence(const Convolution& p, int64_t n) {
  if (p.cu_seqlens.data == nullptr) return {n, n, 0, p.T, 0, p.T};
  const int64_t start = clamp(index_at(p.cu_seqlens, n), 0, p.T);
  const int64_t end = clamp(index_at(p.cu_seqlens, n + 1), start, p.T);
  return {0, n, start, end, start, end};
}

// The pieces of a run, one after the other. A token belongs to the last sequence that starts at or
// before it. With wrong offsets the search still finds some sequence that starts at or before the
// token and ends after it.
class Pieces {
 public:
  __device__ __forceinline__ Pieces(const Convolution& p, int64_t run)
      : row_(run / p.runs.count), t_((run - row_ * p.runs.count) * p.runs.tokens) {
    end_ = min(t_ + p.runs.tokens, p.T);
    if (p.cu_seqlens.data == nullptr) return;
    int64_t behind = p.N + 1;  // for n_: offsets from here on are taken to be above t_
    while (n_ + 1 < behind) {
      const int64_t middle = (n_ + behind) / 2;
      if (index_at(p.cu_seqlens, middle) <= t_)
        n_ = middle;
      else
        behind = middle;
    }
  }

  __device__ __forceinline__ bool next(const Convolution& p, Piece& piece) {
    if (t_ >= end_) return false;
    if (p.cu_seqlens.data == nullptr) {
      piece = {row_, row_, 0, p.T, t_, end_};
    } else {
      while (n_ < p.N && index_at(p.cu_seqlens, n_ + 1) <= t_) ++n_;
      const int64_t start = n_ < 0 ? 0 : clamp(index_at(p.cu_seqlens, n_), 0, t_);
      const int64_t end = n_ < p.N ? min(index_at(p.cu_seqlens, n_ + 1), p.T) : p.T;
      piece = {0, n_ < p.N ? n_ : -1, start, end, t_, min(end, end_)};
    }
    t_ = piece.to;
    return true;
  }

 private:
  int64_t row_, t_, end_;
  int64_t n_ = -1;  // the last sequence that starts at or before t_, or -1
};

// The address of a thread's channels in a token of x or dy.
template <class T, int kC>
__device__ __forceinline__ const T* row_of(const TokenRows& x, int64_t row, int64_t t,
                                           const Place<kC>& place) {
  return static_cast<const T*>(x.data) + row * x.stride_b + t * x.stride_t + place.channel;
}

template <class T, int kC>
__device__ __forceinline__ Vec<T, kC> load_row(const Convolution& p, const T* row,
                                               const Place<kC>& place) {
  return p.aligned ? load_aligned<T, kC>(row, true) : load_each<T, kC>(row, place.valid);
}

// Loads `count` tokens from t on, then zeros. kWhole: there are kAtOnce tokens, and they are
// aligned.
template <int kAtOnce, bool kWhole, class T, int kC>
__device__ __forceinline__ void load_tokens(Vec<T, kC>* out, const Convolution& p,
                                            const TokenRows& x, const Piece& piece, int64_t t,
                                            int64_t count, const Place<kC>& place) {
  const T* row = row_of<T>(x, piece.row, t, place);
  if (kWhole || p.aligned) {
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
      out[r] = load_aligned<T, kC>(row + r * x.stride_t, kWhole || r < count);
  } else {
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
      out[r] = load_each<T, kC>(row + r * x.stride_t, r < count ? place.valid : 0);
  }
}

// Loads elements of [N, D, W]: the thread's channels at index i of W.
template <class T, int kC>
__device__ __forceinline__ Vec<T, kC> load_of_state(const void* state, const Convolution& p,
                                                    int64_t n, int64_t i, const Place<kC>& place) {
  const T* first = static_cast<const T*>(state) + (n * p.D + place.channel) * p.W + i;
  Vec<T, kC> x;
  x.clear();
#pragma unroll
  for (int c = 0; c < kC; ++c)
    if (c < place.valid) x.set(c, first[c * p.W]);
  return x;
}

// Loads x of a token, which may be up to W before its sequence: then from the cache, or 0.
template <class T, int kC>
__device__ __forceinline__ Vec<T, kC> load_input(const Convolution& p, const Piece& piece,
                                                 int64_t t, const Place<kC>& place) {
  if (t >= piece.start) return load_row(p, row_of<T>(p.x, piece.row, t, place), place);
  if (p.cache != nullptr && piece.n >= 0)
    return load_of_state<T>(p.cache, p, piece.n, p.W + t - piece.start, place);
  Vec<T, kC> zero;
  zero.clear();
  return zero;
}

// Loads the taps of each channel in the order of their tokens: elements [channel, kW] of a weight,
// or with kW = 1 of a bias.
template <int kW, int kC>
__device__ __forceinline__ void load_taps(const void* data, DType dtype, bool aligned,
                                          const Place<kC>& place, float (&w)[kW][kC]) {
  const auto load = [&](auto type) {
    using E = typename decltype(type)::type;
    const E* first = static_cast<const E*>(data) + place.channel * kW;
#pragma unroll
    for (int j = 0; j < kW; ++j) {
      const Vec<E, kC> x = aligned ? load_aligned<E, kC>(first + j * kC, place.valid > 0)
                                   : load_each<E, kC>(first + j * kC, place.valid * kW - j * kC);
#pragma unroll
      for (int i = 0; i < kC; ++i) w[(j * kC + i) % kW][(j * kC + i) / kW] = x[i];
    }
  };
  if (dtype == DType::kBFloat16)
    load(Type<bf16>{});
  else if (dtype == DType::kHalf)
    load(Type<half>{});
  else
    load(Type<float>{});
}

template <int kC>
__device__ __forceinline__ void load_bias(const Convolution& p, const Place<kC>& place,
                                          float (&bias)[kC]) {
  float of_tap[1][kC] = {};
  if (p.bias != nullptr) load_taps<1>(p.bias, p.bias_dtype, p.aligned, place, of_tap);
#pragma unroll
  for (int i = 0; i < kC; ++i) bias[i] = of_tap[0][i];
}

// z = bias + Σ_j w_j x_{t-W+1+j}, the oldest token first.
template <int kW, class T, int kC>
__device__ __forceinline__ void preactivation(const float (&w)[kW][kC], const float (&bias)[kC],
                                              const Vec<T, kC>* in, float (&z)[kC]) {
#pragma unroll
  for (int i = 0; i < kC; ++i) {
    z[i] = bias[i];
#pragma unroll
    for (int j = 0; j < kW; ++j) z[i] = fmaf(w[j][i], in[j][i], z[i]);
  }
}

template <class T>
__device__ __forceinline__ float silu(float z) {
  return z * sigmoid<T>(z);
}
template <class T>
__device__ __forceinline__ float silu_slope(float z) {
  const float s = sigmoid<T>(z);
  return fmaf(z * s, 1.f - s, s);
}

// The gradient of one of a sequence's last W tokens from the state after the sequence; 0 for other
// tokens.
template <class T, int kC>
__device__ __forceinline__ void state_gradient(const Convolution& p, const Piece& piece, int64_t t,
                                               const Place<kC>& place, float (&dx)[kC]) {
#pragma unroll
  for (int i = 0; i < kC; ++i) dx[i] = 0.f;
  if (p.dstate == nullptr || piece.n < 0 || piece.end - t > p.W) return;
  const Vec<T, kC> x = load_of_state<T>(p.dstate, p, piece.n, p.W - (piece.end - t), place);
#pragma unroll
  for (int i = 0; i < kC; ++i) dx[i] = x[i];
}

// Stores the last W inputs of sequence n, bit for bit except for the payload of NaN. kW is W, or 0
// if W is not known at compile time.
template <int kW, class T, int kC>
__device__ __forceinline__ void store_state(const Convolution& p, int64_t n,
                                            const Place<kC>& place) {
  const int64_t W = kW > 0 ? kW : p.W;
  const Piece piece = sequence(p, n);
  T* state = static_cast<T*>(p.state) + (n * p.D + place.channel) * W;
  const auto store = [&](int64_t i) {
    const Vec<T, kC> x = load_input<T>(p, piece, piece.end - W + i, place);
#pragma unroll
    for (int c = 0; c < kC; ++c)
      if (c < place.valid) state[c * W + i] = from_float<T>(x[c]);
  };
  if constexpr (kW > 0) {
#pragma unroll
    for (int i = 0; i < kW; ++i) store(i);
  } else {
    for (int64_t i = 0; i < W; ++i) store(i);
  }
}

// Adds the sums of a block's threads for its channels, one row after the other, and stores them as
// rows first .. first + kSums - 1 of its partial sums of dw and dbias.
template <int kSums, int kC>
__device__ __forceinline__ void store_partials(const Convolution& p, const ConvolutionGrid& grid,
                                               int64_t first, const float (&sums)[kSums][kC]) {
  __shared__ float s_sums[kSums * kC][kConvThreads];
#pragma unroll
  for (int j = 0; j < kSums; ++j)
#pragma unroll
    for (int i = 0; i < kC; ++i) s_sums[j * kC + i][threadIdx.x] = sums[j][i];
  __syncthreads();  // s_sums is written
  float* partials = p.partials + (int64_t{blockIdx.y} * (p.W + 1) + first) * p.D;
  const int columns = grid.lanes * kC;
  for (int k = threadIdx.x; k < kSums * columns; k += kConvThreads) {
    const int j = k / columns, lane = k % columns / kC, i = k % kC;
    const int64_t channel = (int64_t{blockIdx.x} * grid.lanes + lane) * kC + i;
    if (channel >= p.D) continue;
    float sum = 0.f;
    for (int row = 0; row < grid.rows(); ++row) sum += s_sums[j * kC + i][row * grid.lanes + lane];
    partials[j * p.D + channel] = sum;
  }
  __syncthreads();  // s_sums is read
}

// Calls f(Type<T>, integral_constant of W), for W up to kUnrolledTaps.
template <class F>
void with_taps(const Convolution& p, F&& f) {
  with_dtype(p.dtype, [&](auto type) {
    if (p.W == 1) return f(type, std::integral_constant<int, 1>{});
    if (p.W == 2) return f(type, std::integral_constant<int, 2>{});
    if (p.W == 3) return f(type, std::integral_constant<int, 3>{});
    return f(type, std::integral_constant<int, kUnrolledTaps>{});
  });
}

}  // namespace gla_ext::cuda
