// A causal convolution of every channel over the last W tokens, then SiLU, for a piece of a
// sequence, with w_j the tap of the token W - 1 - j before:
//   z_t = bias + Σ_j w_j x_{t-W+1+j}      y_t = silu(z_t)      dz_t = dy_t silu'(z_t)
//   dx_t = Σ_s w_{W-1-s} dz_{t+s}      dw_j = Σ_t dz_t x_{t-W+1+j}      dbias = Σ_t dz_t
// The inputs before the sequence are its cache, or 0. dx includes the gradient of the state after
// the sequence, and dcache is dx of the tokens before the sequence.
//
// reads   x, dy [B, T, D], w [W, D], bias [D], cache, dstate [N, D, W]
// writes  y [B, T, D]; dx [B, T, D], dcache [N, D, W], dw and dbias of the piece [W + 1, D]
// Everything is accumulated in T and rounded once, in an order that the token alone decides.
#include "cpu_kernels.h"

#include "cpu/kernel_tables.h"
#include "cpu/kernels/activation.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// The rows of the last W tokens, in turns.
template <typename T>
struct RowRing {
  T* data;
  int64_t W, width;

  // The row of any token, from W before the first one of a batch row.
  T* operator[](int64_t token) const { return data + (token + W) % W * width; }
};

template <typename T>
int64_t convolution_workspace(int64_t W, int64_t width) {
  return (2 * W + 2) * padded(width) + padded(W * sizeof(T*) / sizeof(T));
}

// The pointers to the rows of the last W tokens, after the other rows of a workspace.
template <typename T>
inline const T** row_pointers(T* workspace, int64_t W, int64_t width) {
  return reinterpret_cast<const T**>(workspace + (2 * W + 2) * width);
}

template <typename T>
inline T element(const void* data, DType dtype, int64_t i) {
  T x;
  convert_row(&x, data, dtype, i, 1);
  return x;
}

// row <- x of a token, which may be up to W before the sequence; then zeros.
template <typename T>
inline void load_input(T* row, const Convolution<T>& p, const ConvolutionPiece& piece, int64_t t) {
  if (t >= piece.start) {
    convert_row(row, p.x.data, p.dtype, piece.row * p.x.stride_b + t * p.x.stride_t + piece.channel,
                piece.width);
    std::memset(row + piece.width, 0, (padded(piece.width) - piece.width) * sizeof(T));
    return;
  }
  fill(row, padded(piece.width), T(0));
  if (p.cache == nullptr || piece.n < 0) return;
  const int64_t first = (piece.n * p.D + piece.channel) * p.W + p.W + t - piece.start;
  for (int64_t i = 0; i < piece.width; ++i) row[i] = element<T>(p.cache, p.dtype, first + i * p.W);
}

// z of a token, from the last W inputs.
template <typename T>
inline Vec<T> preactivation(const Convolution<T>& p, const T* const* inputs, int64_t channel,
                            int64_t i) {
  Vec<T> z = Vec<T>::loadu(p.bias + channel + i);
  const int64_t Dp = padded(p.D);
  for (int64_t j = 0; j < p.W; ++j)
    z = at::vec::fmadd(Vec<T>::loadu(p.weight + j * Dp + channel + i), Vec<T>::loadu(inputs[j] + i),
                       z);
  return z;
}

template <typename T>
void forward(const Convolution<T>& p, T* workspace, const ConvolutionPiece& piece) {
  const int64_t width = padded(piece.width);
  const T** inputs = row_pointers(workspace, p.W, width);
  const RowRing<T> x{workspace, p.W, width};
  T* y = workspace + p.W * width;
  for (int64_t t = piece.from - (p.W - 1); t < piece.from; ++t) load_input(x[t], p, piece, t);
  for (int64_t t = piece.from; t < piece.to; ++t) {
    load_input(x[t], p, piece, t);
    for (int64_t j = 0; j < p.W; ++j) inputs[j] = x[t - (p.W - 1) + j];
    for (int64_t i = 0; i < width; i += Vec<T>::size())
      activated(Activation::kSwish, preactivation(p, inputs, piece.channel, i)).value.store(y + i);
    convert_row_back(p.y.data, p.dtype, piece.row * p.y.stride_b + t * p.y.stride_t + piece.channel,
                     y, piece.width);
  }
}

// dx of a token. The token may be up to W - 1 before the sequence; this is dcache. dz: of this
// token and those after it.
template <typename T>
inline void input_gradient(const Convolution<T>& p, const ConvolutionPiece& piece, int64_t t,
                           const RowRing<T>& dz, T* dx) {
  const int64_t width = padded(piece.width), Dp = padded(p.D);
  fill(dx, width, T(0));
  const int64_t in_state = p.W - (piece.end - t);
  if (p.dstate != nullptr && piece.n >= 0 && in_state >= 0) {
    const int64_t first = (piece.n * p.D + piece.channel) * p.W + in_state;
    for (int64_t i = 0; i < piece.width; ++i)
      dx[i] = element<T>(p.dstate, p.dtype, first + i * p.W);
  }
  for (int64_t s = 0; s < p.W; ++s) {
    const T* weight = p.weight + (p.W - 1 - s) * Dp + piece.channel;
    map<T>(
        width, [](Vec<T> w, Vec<T> g, Vec<T> sum) { return at::vec::fmadd(w, g, sum); }, dx, weight,
        dz[t + s], dx);
  }
}

// Computes a token's dz and, if it is `owned`, adds its contributions to dw and dbias.
template <typename T>
inline void token_gradient(const Convolution<T>& p, const ConvolutionPiece& piece,
                           const T* const* inputs, const T* dy, bool owned, T* dz) {
  const int64_t width = padded(piece.width), Dp = padded(p.D);
  T* part = p.dweight_parts + piece.part * (p.W + 1) * Dp + piece.channel;
  for (int64_t i = 0; i < width; i += Vec<T>::size()) {
    const Vec<T> z = preactivation(p, inputs, piece.channel, i);
    const Vec<T> g = Vec<T>::loadu(dy + i) * activated(Activation::kSwish, z).slope;
    g.store(dz + i);
    if (!owned) continue;
    for (int64_t j = 0; j < p.W; ++j) {
      T* sum = part + j * Dp + i;
      at::vec::fmadd(g, Vec<T>::loadu(inputs[j] + i), Vec<T>::loadu(sum)).store(sum);
    }
    T* sum = part + p.W * Dp + i;
    (g + Vec<T>::loadu(sum)).store(sum);
  }
}

template <typename T>
void backward(const Convolution<T>& p, T* workspace, const ConvolutionPiece& piece) {
  const int64_t width = padded(piece.width);
  const T** inputs = row_pointers(workspace, p.W, width);
  const RowRing<T> x{workspace, p.W, width}, dz{workspace + p.W * width, p.W, width};
  T *dy = workspace + 2 * p.W * width, *dx = dy + width;
  fill(dz.data, p.W * width, T(0));
  for (int64_t t = piece.from - (p.W - 1); t < piece.from; ++t) load_input(x[t], p, piece, t);
  const bool before_too = p.dcache != nullptr && piece.n >= 0 && piece.from == piece.start;
  for (int64_t last = piece.from; last < piece.to + p.W - 1; ++last) {
    if (last < piece.end) {
      load_input(x[last], p, piece, last);
      for (int64_t j = 0; j < p.W; ++j) inputs[j] = x[last - (p.W - 1) + j];
      convert_row(dy, p.dy.data, p.dtype,
                  piece.row * p.dy.stride_b + last * p.dy.stride_t + piece.channel, piece.width);
      std::memset(dy + piece.width, 0, (width - piece.width) * sizeof(T));
      token_gradient(p, piece, inputs, dy, last < piece.to, dz[last]);
    } else {
      fill(dz[last], width, T(0));
    }
    const int64_t t = last - (p.W - 1);
    if (t < (before_too ? piece.start - (p.W - 1) : piece.from)) continue;
    input_gradient(p, piece, t, dz, dx);
    if (t >= piece.from) {
      convert_row_back(p.dx.data, p.dtype,
                       piece.row * p.dx.stride_b + t * p.dx.stride_t + piece.channel, dx,
                       piece.width);
      continue;
    }
    const int64_t first = (piece.n * p.D + piece.channel) * p.W + p.W + t - piece.start;
    for (int64_t i = 0; i < piece.width; ++i)
      convert_row_back(p.dcache, p.dtype, first + i * p.W, dx + i, 1);
  }
}

}  // namespace CPU_CAPABILITY

template <>
const ConvolutionKernels<float> KernelTables<ConvolutionKernels<float>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::convolution_workspace<float>, CPU_CAPABILITY::forward<float>,
    CPU_CAPABILITY::backward<float>};
template <>
const ConvolutionKernels<double> KernelTables<ConvolutionKernels<double>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::convolution_workspace<double>, CPU_CAPABILITY::forward<double>,
    CPU_CAPABILITY::backward<double>};

}  // namespace gla_ext::cpu
