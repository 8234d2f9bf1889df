// Forward of the norm with its gate:
//   y = x rstd ⊙ w ⊙ f(gate)      rstd = (mean(x²) + eps)^-0.5
// Or, in place of the gate, with a residual stream of type S, to which x is added first:
//   s = residual + x      y = s rstd ⊙ w      rstd = (mean(s²) + eps)^-0.5
//
// grid    blocks stride over the rows; rows.cuh defines how many rows a block has at once
// reads   x, gate or residual [rows, V], w [V]
// writes  y; with a residual s [rows, V]; rstd [rows] fp32
// Sums and products are fp32. y is rounded once, s before the norm; a row's bits depend only on the
// row.
#include "normed.cuh"
#include "rows.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kAtOnce = 2;        // rows that a thread loads at once
constexpr int kBlocksAtOnce = 3;  // blocks a multiprocessor

// x + residual, rounded to the type of the stream.
template <class T, class S>
__device__ __forceinline__ Eight<S> added(const Eight<T>& x, const Eight<S>& residual) {
  Eight<S> s;
  s.clear();
#pragma unroll
  for (int i = 0; i < 8; ++i) s.set(i, from_float<S>(residual[i] + x[i]));
  return s;
}

template <class S>
__device__ __forceinline__ void to_floats(const Eight<S>& x, float (&y)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i];
}

template <class T>
__device__ __forceinline__ float squares(const Eight<T>& x, float sum) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
  return sum;
}

template <class T, class S, class L>
__global__ void __launch_bounds__(kRowThreads, kBlocksAtOnce)
    narrow_forward(const __grid_constant__ Norm p) {
  __shared__ float s_warps[2][kRowWarps];
  RowSums<L> sum_of_row;
  const int width = static_cast<int>(p.width);
  const int64_t stride = gridDim.x * L::kRows;
  const RowCursor step(p, stride);
  int64_t first = blockIdx.x * L::kRows;
  float w[8];
  load_weight<L::kAccess>(p, L::column(), w);
  RowCursor cursor[L::kAtOnce];
#pragma unroll
  for (int r = 0; r < L::kAtOnce; ++r)
    cursor[r] = RowCursor(p, first + r * L::kGroups + L::group());

  for (; first < p.rows; first += stride) {
    Eight<Normed<T, S>> x[L::kAtOnce];
    Eight<T> gate[L::kAtOnce];
    int valid[L::kAtOnce];
#pragma unroll
    for (int r = 0; r < L::kAtOnce; ++r) {
      valid[r] = first + r * L::kGroups + L::group() < p.rows ? width - L::column() : 0;
      const auto load = [&](const StridedRows& rows) {
        return load8<L::kAccess>(cursor[r].template in<T>(rows) + L::column(), valid[r]);
      };
      if constexpr (kHasStream<S>) {
        gate[r] = load(p.x);
        x[r] = load8<L::kAccess>(cursor[r].template in<S>(p.residual) + L::column(), valid[r]);
      } else {
        x[r] = load(p.x);
        if (p.gate.data != nullptr) gate[r] = load(p.gate);
      }
      cursor[r].advance(p, step);
    }
#pragma unroll
    for (int r = 0; r < L::kAtOnce; ++r) {
      const int64_t row = first + r * L::kGroups + L::group();
      float y[8];
      if constexpr (kHasStream<S>) {
        x[r] = added(gate[r], x[r]);
        to_floats(x[r], y);
        store_results<L::kAccess>(static_cast<S*>(p.stream) + row * width + L::column(), y,
                                  valid[r]);
      }
      const float sum = sum_of_row(squares(x[r], 0.f), s_warps);
      const float rstd = rsqrtf(sum * p.per_width + p.eps);
      if (row < p.rows && L::column() == 0) p.rstd[row] = rstd;
      normed(p, x[r], rstd, w, kHasStream<S> ? nullptr : &gate[r], y);
      store_results<L::kAccess>(static_cast<T*>(p.y) + row * width + L::column(), y, valid[r]);
    }
  }
}

template <class T, class S, Access kAccess>
__global__ void __launch_bounds__(kRowThreads) wide_forward(const __grid_constant__ Norm p) {
  constexpr int kStep = kRowThreads * 8;
  __shared__ float s_warps[2][kRowWarps];
  WarpSums<kRowThreads> sum_of_block;
  const auto valid = [&](int64_t column) {
    return static_cast<int>(min(p.width - column, int64_t{8}));
  };
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowCursor cursor(p, row);
    const T* x = cursor.template in<T>(p.x);
    const T* gate = cursor.template in<T>(p.gate);
    const auto load = [&](int64_t c) {
      if constexpr (kHasStream<S>)
        return added(load8<kAccess>(x + c, valid(c)),
                     load8<kAccess>(cursor.template in<S>(p.residual) + c, valid(c)));
      else
        return load8<kAccess>(x + c, valid(c));
    };
    float sum = 0.f;
    for (int64_t c = threadIdx.x * 8; c < p.width; c += kStep) sum = squares(load(c), sum);
    const float rstd = rsqrtf(sum_of_block(sum, s_warps) * p.per_width + p.eps);
    if (threadIdx.x == 0) p.rstd[row] = rstd;
    for (int64_t c = threadIdx.x * 8; c < p.width; c += kStep) {
      const auto of = load(c);
      Eight<T> g;
      float w[8], y[8];
      if constexpr (kHasStream<S>) {
        to_floats(of, y);
        store_results<kAccess>(static_cast<S*>(p.stream) + row * p.width + c, y, valid(c));
      } else {
        if (p.gate.data != nullptr) g = load8<kAccess>(gate + c, valid(c));
      }
      load_weight<kAccess>(p, c, w);
      normed(p, of, rstd, w, kHasStream<S> ? nullptr : &g, y);
      store_results<kAccess>(static_cast<T*>(p.y) + row * p.width + c, y, valid(c));
    }
  }
}

void residual_forward(const Norm& p, int64_t most, cudaStream_t stream) {
  if (p.width > kNarrow) {
    const auto grid = static_cast<unsigned>(norm_blocks(p, 1, most));
    with_wide_stream(p, [&](auto type, auto of_stream, auto access) {
      using T = typename decltype(type)::type;
      using S = typename decltype(of_stream)::type;
      wide_forward<T, S, decltype(access)::value><<<grid, kRowThreads, 0, stream>>>(p);
    });
    return;
  }
  with_narrow_stream<1>(p, [&](auto type, auto of_stream, auto layout) {
    using T = typename decltype(type)::type;
    using S = typename decltype(of_stream)::type;
    using L = decltype(layout);
    const auto grid = static_cast<unsigned>(norm_blocks(p, L::kRows, most));
    narrow_forward<T, S, L><<<grid, kRowThreads, 0, stream>>>(p);
  });
}

}  // namespace

void norm_forward(const Norm& p, const NormGpu& gpu, cudaStream_t stream) {
  // About four times as many blocks as run at once, so that the last blocks end soon after the
  // others.
  const int64_t most = int64_t{32} * gpu.multiprocessors;
  if (p.residual.data != nullptr) return residual_forward(p, most, stream);
  if (p.width > kNarrow) {
    with_wide(p, [&](auto type, auto access) {
      using T = typename decltype(type)::type;
      wide_forward<T, void, decltype(access)::value>
          <<<static_cast<unsigned>(norm_blocks(p, 1, most)), kRowThreads, 0, stream>>>(p);
    });
    return;
  }
  with_narrow<kAtOnce>(p, [&](auto type, auto layout) {
    using T = typename decltype(type)::type;
    using L = decltype(layout);
    narrow_forward<T, void, L>
        <<<static_cast<unsigned>(norm_blocks(p, L::kRows, most)), kRowThreads, 0, stream>>>(p);
  });
}

}  // namespace gla_ext::cuda
