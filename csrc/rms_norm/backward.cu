// Backward of the norm with its gate, with n = x rstd and u = dy ⊙ w ⊙ f(gate):
//   dgate = dy ⊙ n ⊙ w ⊙ f'(gate)      dx = rstd (u − n mean(u ⊙ n))      dw = Σ dy ⊙ f(gate) ⊙ n
// Or, in place of the gate, with a residual stream of type S, which is x here:
//   dx = dresidual = dstream + rstd (u − n mean(u ⊙ n))
//
// grid    as many blocks as run at once stride over the rows; each stores the dw of its rows, and a
//         second kernel adds these, first block first
// reads   dy, x, gate or dstream [rows, V], w [V], rstd [rows] fp32
// writes  dx, dgate [rows, V], dw [V], and if requested y as forward; with a residual dresidual,
//         and dx if its dtype differs
// Everything in between is fp32; results are rounded once. The order of every sum depends only on
// the shape and the GPU.
#include "cuda/device/activation.cuh"
#include "cuda/device/capability.h"
#include "cuda/device/partials.cuh"
#include "normed.cuh"
#include "rows.cuh"

namespace gla_ext::cuda {
namespace {

// Rows that a thread loads at once. If y is requested, a thread has more registers.
constexpr int kAtOnce = 1, kAtOnceWithOutput = 2;
constexpr int64_t kSharedColumns = 8192;  // most columns of dw in shared memory

// Blocks a multiprocessor, as many as possible without register spills.
constexpr int blocks_at_once(bool wide, bool fp32, bool output, int major) {
  const bool large = fp32 && major >= 10;
  return output ? (large ? 1 : 2) : ((wide && large) || major >= 12 ? 2 : 3);
}

// For eight elements of a row: replaces dy by u; sets dgate and the contributions to dw; returns
// the sum of u ⊙ n.
template <class T, class N>
__device__ __forceinline__ float grads_of_eight(const Norm& p, const Eight<N>& x,
                                                const Eight<T>* gate, float rstd,
                                                const float (&w)[8], float (&u)[8],
                                                float (&dgate)[8], float (&dw)[8]) {
  float sum = 0.f;
  const auto each = [&](auto activate) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float n = x[i] * rstd;
      float f, slope;
      activate(gate == nullptr ? 0.f : (*gate)[i], f, slope);
      dgate[i] = u[i] * n * w[i] * slope;
      u[i] *= f;
      dw[i] = fmaf(u[i], n, dw[i]);
      u[i] *= w[i];
      sum = fmaf(u[i], n, sum);
    }
  };
  if (gate != nullptr && p.gate.data != nullptr)
    with_activation<T>(p.activation, each);
  else
    each([](float, float& f, float& slope) { f = 1.f, slope = 0.f; });
  return sum;
}

template <class N>
__device__ __forceinline__ void finish_dx(const Eight<N>& x, float rstd, float mean,
                                          float (&u)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) u[i] = rstd * (u[i] - x[i] * rstd * mean);
}

template <class T>
__device__ __forceinline__ void to_floats(const Eight<T>& x, float (&y)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i];
}

// Stores eight results at `offset` of dx. With a residual, first adds the stream's gradient.
template <class T, class S, Access kAccess>
__device__ __forceinline__ void store_dx(const Norm& p, int64_t offset,
                                         const Eight<Normed<T, S>>& dstream, float (&u)[8],
                                         int valid) {
  if constexpr (kHasStream<S>) {
    if (p.dstream.data != nullptr) {
#pragma unroll
      for (int i = 0; i < 8; ++i) u[i] += dstream[i];
    }
    store_results<kAccess>(static_cast<S*>(p.dresidual) + offset, u, valid);
    if constexpr (std::is_same_v<T, S>) return;
  }
  store_results<kAccess>(static_cast<T*>(p.dx) + offset, u, valid);
}

// Stores eight results at `offset` of y.
template <class T, Access kAccess>
__device__ __forceinline__ void store_y(const Norm& p, int64_t offset, const Eight<T>& x,
                                        const Eight<T>& gate, float rstd, const float (&w)[8],
                                        int valid) {
  float y[8];
  normed(p, x, rstd, w, &gate, y);
  store_results<kAccess>(static_cast<T*>(p.y) + offset, y, valid);
}

// Sums the threads' dw into the block's, one group after the other.
template <class L>
__device__ __forceinline__ void store_partials(const Norm& p, const float (&dw)[8]) {
  __shared__ float s_dw[L::kGroups][L::kColumns];
#pragma unroll
  for (int i = 0; i < 8; ++i) s_dw[L::group()][L::column() + i] = dw[i];
  __syncthreads();  // s_dw is written
  for (int column = threadIdx.x; column < p.width; column += kRowThreads) {
    float sum = 0.f;
    for (int group = 0; group < L::kGroups; ++group) sum += s_dw[group][column];
    p.partials[blockIdx.x * p.width + column] = sum;
  }
}

template <class T, class S, class L, bool kOutput>
__global__ void __launch_bounds__(kRowThreads,
                                  blocks_at_once(false, std::is_same_v<Normed<T, S>, float>,
                                                 kOutput, kMajor))
    narrow_backward(const __grid_constant__ Norm p) {
  __shared__ float s_warps[2][kRowWarps];
  RowSums<L> sum_of_row;
  const int width = static_cast<int>(p.width);
  const int64_t stride = gridDim.x * L::kRows;
  const RowCursor step(p, stride);
  int64_t first = blockIdx.x * L::kRows;
  float w[8], dw[8] = {};
  load_weight<L::kAccess>(p, L::column(), w);
  RowCursor cursor[L::kAtOnce];
#pragma unroll
  for (int r = 0; r < L::kAtOnce; ++r)
    cursor[r] = RowCursor(p, first + r * L::kGroups + L::group());

  for (; first < p.rows; first += stride) {
    Eight<Normed<T, S>> x[L::kAtOnce], dstream[L::kAtOnce];
    Eight<T> gate[L::kAtOnce], dy[L::kAtOnce];
    float rstd[L::kAtOnce];
    int valid[L::kAtOnce];
#pragma unroll
    for (int r = 0; r < L::kAtOnce; ++r) {
      const int64_t row = first + r * L::kGroups + L::group();
      valid[r] = row < p.rows ? width - L::column() : 0;
      const auto load = [&](auto type, const StridedRows& rows) {
        using E = typename decltype(type)::type;
        return load8<L::kAccess>(cursor[r].template in<E>(rows) + L::column(), valid[r]);
      };
      x[r] = load(Type<Normed<T, S>>{}, p.x);
      dy[r] = load(Type<T>{}, p.dy);
      if constexpr (kHasStream<S>) {
        if (p.dstream.data != nullptr) dstream[r] = load(Type<S>{}, p.dstream);
      } else {
        if (p.gate.data != nullptr) gate[r] = load(Type<T>{}, p.gate);
      }
      rstd[r] = row < p.rows ? p.rstd[row] : 0.f;
      cursor[r].advance(p, step);
    }
#pragma unroll
    for (int r = 0; r < L::kAtOnce; ++r) {
      const int64_t row = first + r * L::kGroups + L::group();
      float u[8], dgate[8];
      to_floats(dy[r], u);
      const Eight<T>* const of_gate = kHasStream<S> ? nullptr : &gate[r];
      if constexpr (kOutput)
        store_y<T, L::kAccess>(p, row * width + L::column(), x[r], gate[r], rstd[r], w, valid[r]);
      const float sum = grads_of_eight(p, x[r], of_gate, rstd[r], w, u, dgate, dw);
      if (!kHasStream<S> && p.gate.data != nullptr)
        store_results<L::kAccess>(static_cast<T*>(p.dgate) + row * width + L::column(), dgate,
                                  valid[r]);
      const float mean = sum_of_row(sum, s_warps) * p.per_width;
      finish_dx(x[r], rstd[r], mean, u);
      store_dx<T, S, L::kAccess>(p, row * width + L::column(), dstream[r], u, valid[r]);
    }
  }
  if (p.weight != nullptr) store_partials<L>(p, dw);
}

// A thread has the same columns in every row, so dw needs no barrier.
template <class T, class S, Access kAccess, bool kOutput>
__global__ void __launch_bounds__(kRowThreads,
                                  blocks_at_once(true, std::is_same_v<Normed<T, S>, float>, kOutput,
                                                 kMajor))
    wide_backward(const __grid_constant__ Norm p) {
  constexpr int kStep = kRowThreads * 8;
  extern __shared__ float s_dw[];  // [V] if V is at most kSharedColumns, else unused
  __shared__ float s_warps[2][kRowWarps];
  WarpSums<kRowThreads> sum_of_block;
  float* partials = p.partials + blockIdx.x * p.width;
  float* sums = p.width <= kSharedColumns ? s_dw : partials;
  const auto valid = [&](int64_t column) {
    return static_cast<int>(min(p.width - column, int64_t{8}));
  };
  const auto for_columns = [&](auto&& f) {
    for (int64_t c = threadIdx.x * 8; c < p.width; c += kStep) f(c);
  };
  const auto for_sums = [&](int64_t c, auto&& f) {
    if (p.weight == nullptr) return;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid(c)) f(sums[c + i], i);
  };
  for_columns([&](int64_t c) { for_sums(c, [](float& sum, int) { sum = 0.f; }); });
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowCursor cursor(p, row);
    const float rstd = p.rstd[row];
    float sum = 0.f;
    // Loads and computes u of eight columns; in the first pass also dgate and dw.
    const auto load = [&](auto type, const StridedRows& rows, int64_t c) {
      using E = typename decltype(type)::type;
      return load8<kAccess>(cursor.template in<E>(rows) + c, valid(c));
    };
    const auto pass = [&](int64_t c, Eight<Normed<T, S>>& x, float (&u)[8], bool is_first) {
      Eight<T> gate;
      x = load(Type<Normed<T, S>>{}, p.x, c);
      to_floats(load(Type<T>{}, p.dy, c), u);
      if (!kHasStream<S> && p.gate.data != nullptr) gate = load(Type<T>{}, p.gate, c);
      float w[8], dgate[8], dw[8] = {};
      load_weight<kAccess>(p, c, w);
      const Eight<T>* const of_gate = kHasStream<S> ? nullptr : &gate;
      const float part = grads_of_eight(p, x, of_gate, rstd, w, u, dgate, dw);
      if (!is_first) return;
      if constexpr (kOutput) store_y<T, kAccess>(p, row * p.width + c, x, gate, rstd, w, valid(c));
      sum += part;
      for_sums(c, [&](float& total, int i) { total += dw[i]; });
      if (!kHasStream<S> && p.gate.data != nullptr)
        store_results<kAccess>(static_cast<T*>(p.dgate) + row * p.width + c, dgate, valid(c));
    };
    Eight<Normed<T, S>> x, dstream;
    float u[8];
    for_columns([&](int64_t c) { pass(c, x, u, true); });
    const float mean = sum_of_block(sum, s_warps) * p.per_width;
    for_columns([&](int64_t c) {
      pass(c, x, u, false);
      finish_dx(x, rstd, mean, u);
      if (kHasStream<S> && p.dstream.data != nullptr)
        dstream = load(Type<Normed<T, S>>{}, p.dstream, c);
      store_dx<T, S, kAccess>(p, row * p.width + c, dstream, u, valid(c));
    });
  }
  for_columns([&](int64_t c) { for_sums(c, [&](float& sum, int i) { partials[c + i] = sum; }); });
}

// Sums the blocks' partial results into dw.
__global__ void __launch_bounds__(kSumColumns* kSumRows) sum_partials(Norm p, int64_t blocks) {
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  const float sum = sum_over_blocks(p.partials, blocks, p.width, column);
  if (threadIdx.y == 0 && column < p.width) store_any(p.dweight, p.weight_dtype, column, sum);
}

bool has_fp32_rows(const Norm& p) {
  return (p.dresidual == nullptr ? p.dtype : p.stream_dtype) == DType::kFloat;
}

}  // namespace

int64_t norm_backward_blocks(const Norm& p, const NormGpu& gpu) {
  const bool wide = p.width > kNarrow;
  const int64_t most = int64_t{blocks_at_once(wide, has_fp32_rows(p), p.y != nullptr, gpu.major)} *
                       gpu.multiprocessors;
  if (wide) return norm_blocks(p, 1, most);
  int64_t blocks = 0;
  const auto count = [&](auto layout) { blocks = norm_blocks(p, decltype(layout)::kRows, most); };
  if (p.dresidual != nullptr)
    with_narrow_stream<kAtOnce>(p, [&](auto, auto, auto layout) { count(layout); });
  else if (p.y != nullptr)
    with_narrow<kAtOnceWithOutput>(p, [&](auto, auto layout) { count(layout); });
  else
    with_narrow<kAtOnce>(p, [&](auto, auto layout) { count(layout); });
  return blocks;
}

void norm_backward(const Norm& p, const NormGpu& gpu, cudaStream_t stream) {
  const int64_t blocks = norm_backward_blocks(p, gpu);
  const auto grid = static_cast<unsigned>(blocks);
  // With a stream, y is never requested.
  const bool has_stream = p.dresidual != nullptr;
  if (p.width > kNarrow) {
    const bool shared = p.weight != nullptr && p.width <= kSharedColumns;
    const size_t smem_bytes = shared ? p.width * sizeof(float) : 0;
    const auto run = [&](auto output, auto type, auto of_stream, auto access) {
      using T = typename decltype(type)::type;
      using S = typename decltype(of_stream)::type;
      wide_backward<T, S, decltype(access)::value, decltype(output)::value>
          <<<grid, kRowThreads, smem_bytes, stream>>>(p);
    };
    if (has_stream)
      with_wide_stream(p, [&](auto... types) { run(std::false_type{}, types...); });
    else
      with_wide(p, [&](auto type, auto access) {
        if (p.y != nullptr)
          run(std::true_type{}, type, Type<void>{}, access);
        else
          run(std::false_type{}, type, Type<void>{}, access);
      });
  } else {
    const auto run = [&](auto output, auto type, auto of_stream, auto layout) {
      using T = typename decltype(type)::type;
      using S = typename decltype(of_stream)::type;
      narrow_backward<T, S, decltype(layout), decltype(output)::value>
          <<<grid, kRowThreads, 0, stream>>>(p);
    };
    if (has_stream)
      with_narrow_stream<kAtOnce>(p, [&](auto... types) { run(std::false_type{}, types...); });
    else if (p.y != nullptr)
      with_narrow<kAtOnceWithOutput>(
          p, [&](auto type, auto layout) { run(std::true_type{}, type, Type<void>{}, layout); });
    else
      with_narrow<kAtOnce>(
          p, [&](auto type, auto layout) { run(std::false_type{}, type, Type<void>{}, layout); });
  }
  if (p.weight == nullptr) return;
  const auto columns = static_cast<unsigned>((p.width + kSumColumns - 1) / kSumColumns);
  sum_partials<<<columns, dim3(kSumColumns, kSumRows), 0, stream>>>(p, blocks);
}

}  // namespace gla_ext::cuda
