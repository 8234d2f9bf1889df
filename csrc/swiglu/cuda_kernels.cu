// SwiGLU, with s = σ(gate):
//   y = gate s up      dgate = dy s (1 + gate (1 − s)) up      dup = dy gate s
//
// grid    a thread has kAtOnce packs of 16 bytes, a block's width apart, in every gridDim.y-th row;
//         contiguous tensors are one row
// reads   gate, up, backward dy [rows, D]
// writes  y; or dgate, dup and, if requested, y [rows, D]
// Everything is fp32; results are rounded once. An element's bits depend only on the element.
#include "cuda/device/activation.cuh"
#include "cuda/device/vec.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda {
namespace {

constexpr int kSwigluThreads = 256;   // threads of a block, at most
constexpr int kAtOnce = 2;            // packs of a thread
constexpr int64_t kMostRows = 65535;  // rows of a grid

template <class T>
constexpr int kElements = 16 / sizeof(T);  // elements of a pack

template <class T>
using RowPack = Vec<T, kElements<T>>;

// Row blockIdx.y, and after each next() the row that is gridDim.y further.
class Row {
 public:
  __device__ __forceinline__ explicit Row(const Swiglu& p) : row_(blockIdx.y) {
    const auto inner_rows = static_cast<unsigned>(min(p.inner_rows, kMostRows + 1));
    outer_ = blockIdx.y / inner_rows, inner_ = blockIdx.y % inner_rows;
    outer_step_ = gridDim.y / inner_rows, inner_step_ = gridDim.y % inner_rows;
  }
  __device__ __forceinline__ void next(const Swiglu& p) {
    row_ += gridDim.y;
    outer_ += outer_step_;
    inner_ += inner_step_;
    if (inner_ >= p.inner_rows) {
      inner_ -= p.inner_rows;
      ++outer_;
    }
  }
  __device__ __forceinline__ bool is_there(const Swiglu& p) const { return row_ < p.rows; }

  // Loads the pack of an input from `column` on; elements that do not exist are zero.
  template <Access kAccess, class T>
  __device__ __forceinline__ RowPack<T> load(const StridedRows& rows, int64_t column,
                                             int valid) const {
    const T* at = static_cast<const T*>(rows.data) + outer_ * rows.strides.outer +
                  inner_ * rows.strides.inner + column;
    if (kAccess == Access::kFast && valid == kElements<T>)
      return load_aligned<T, kElements<T>>(at, true);
    return load_each<T, kElements<T>>(at, valid);
  }
  template <Access kAccess, class T>
  __device__ __forceinline__ void store(const Swiglu& p, void* rows, int64_t column, int valid,
                                        const float (&x)[kElements<T>]) const {
    store_vec(static_cast<T*>(rows) + row_ * p.width + column, x, valid,
              kAccess == Access::kFast && valid == kElements<T>);
  }

 private:
  int64_t row_, outer_, inner_;
  unsigned outer_step_, inner_step_;
};

// The columns of a thread.
template <class T>
class Columns {
 public:
  __device__ __forceinline__ explicit Columns(const Swiglu& p)
      : first_((int64_t{blockIdx.x} * (blockDim.x * kAtOnce) + threadIdx.x) * kElements<T>),
        left_(p.width - first_) {}
  __device__ __forceinline__ int64_t column(int r) const { return first_ + between(r); }
  // The number of elements of pack r that exist.
  __device__ __forceinline__ int valid(int r) const {
    const int64_t left = left_ - between(r);
    return left < kElements<T> ? max(static_cast<int>(left), 0) : kElements<T>;
  }

 private:
  __device__ __forceinline__ static int between(int r) { return r * blockDim.x * kElements<T>; }

  int64_t first_, left_;
};

// Returns gate s and sets s.
template <class T>
__device__ __forceinline__ float silu(float gate, float& s) {
  if constexpr (std::is_same_v<T, float>) {
    const float below = 1.f + expf(-gate);
    s = 1.f / below;
    return gate / below;  // not gate * s, which rounds once more
  } else {
    s = sigmoid<T>(gate);
    return gate * s;
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kSwigluThreads) forward(const __grid_constant__ Swiglu p) {
  const Columns<T> columns(p);
  for (Row row(p); row.is_there(p); row.next(p)) {
    RowPack<T> gate[kAtOnce], up[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const auto load = [&](const StridedRows& rows) {
        return row.load<kAccess, T>(rows, columns.column(r), columns.valid(r));
      };
      gate[r] = load(p.gate);
      up[r] = load(p.up);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      float y[kElements<T>], s;
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) y[i] = silu<T>(gate[r][i], s) * up[r][i];
      row.store<kAccess, T>(p, p.y, columns.column(r), columns.valid(r), y);
    }
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kSwigluThreads) backward(const __grid_constant__ Swiglu p) {
  const Columns<T> columns(p);
  for (Row row(p); row.is_there(p); row.next(p)) {
    RowPack<T> gate[kAtOnce], up[kAtOnce], dy[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const auto load = [&](const StridedRows& rows) {
        return row.load<kAccess, T>(rows, columns.column(r), columns.valid(r));
      };
      gate[r] = load(p.gate);
      up[r] = load(p.up);
      dy[r] = load(p.dy);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const auto store = [&](void* rows, const float (&x)[kElements<T>]) {
        row.store<kAccess, T>(p, rows, columns.column(r), columns.valid(r), x);
      };
      float y[kElements<T>], dgate[kElements<T>], dup[kElements<T>];
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) {
        float s;
        const float f = silu<T>(gate[r][i], s), u = up[r][i], grad = dy[r][i];
        dgate[i] = grad * fmaf(f, 1.f - s, s) * u;
        dup[i] = grad * f;
        y[i] = f * u;
      }
      store(p.dgate, dgate);
      store(p.dup, dup);
      if (p.y != nullptr) store(p.y, y);
    }
  }
}

// Calls f(Type<T>, Constant<Access>, grid, threads).
template <class F>
void with_grid(const Swiglu& p, F&& f) {
  with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t packs = (p.width + kElements<T> - 1) / kElements<T>;
    const int64_t warps = (packs + 31) / 32;
    const int threads = warps < kSwigluThreads / 32 ? static_cast<int>(32 * warps) : kSwigluThreads;
    const dim3 grid(static_cast<unsigned>((packs + threads * kAtOnce - 1) / (threads * kAtOnce)),
                    static_cast<unsigned>(p.rows < kMostRows ? p.rows : kMostRows));
    if (p.aligned)
      f(type, Constant<Access::kFast>{}, grid, threads);
    else
      f(type, Constant<Access::kGeneral>{}, grid, threads);
  });
}

}  // namespace

void swiglu_forward(const Swiglu& p, cudaStream_t stream) {
  with_grid(p, [&](auto type, auto access, dim3 grid, int threads) {
    using T = typename decltype(type)::type;
    forward<T, decltype(access)::value><<<grid, threads, 0, stream>>>(p);
  });
}

void swiglu_backward(const Swiglu& p, cudaStream_t stream) {
  with_grid(p, [&](auto type, auto access, dim3 grid, int threads) {
    using T = typename decltype(type)::type;
    backward<T, decltype(access)::value><<<grid, threads, 0, stream>>>(p);
  });
}

}  // namespace gla_ext::cuda
