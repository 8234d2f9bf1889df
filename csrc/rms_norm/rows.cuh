// Rows of the norm: which thread has which elements, where rows start, and sums over a row.
//
// A row of up to kNarrow columns belongs to kLanes neighbouring threads, each of which holds eight
// columns in registers. A wider row belongs to a block, which reads it twice.
#pragma once

#include "cuda/device/rows.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda {

constexpr int kNarrow = 8 * kRowThreads;

// The start of row `row`, and after each advance() of row `row + step`. It divides only at
// construction.
class RowCursor {
 public:
  RowCursor() = default;
  __device__ __forceinline__ RowCursor(const Norm& p, int64_t row)
      : outer_(row / p.inner_rows), inner_(row % p.inner_rows) {}
  __device__ __forceinline__ void advance(const Norm& p, const RowCursor& step) {
    outer_ += step.outer_;
    inner_ += step.inner_;
    if (inner_ >= p.inner_rows) {
      inner_ -= p.inner_rows;
      ++outer_;
    }
  }
  template <class T>
  __device__ __forceinline__ const T* in(const StridedRows& rows) const {
    return static_cast<const T*>(rows.data) + outer_ * rows.strides.outer +
           inner_ * rows.strides.inner;
  }

 private:
  int64_t outer_, inner_;
};

// Loads the weight of eight columns: 1 if there is no weight, 0 after the last column.
template <Access kAccess>
__device__ __forceinline__ void load_weight(const Norm& p, int64_t column, float (&w)[8]) {
  const int64_t left = p.width - column;
  const int valid = left < 8 ? static_cast<int>(left) : 8;
  const auto load = [&](auto type) {
    using W = typename decltype(type)::type;
    const Eight<W> x = load8<kAccess>(static_cast<const W*>(p.weight) + column, valid);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = x[i];
  };
  if (p.weight == nullptr) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = i < valid ? 1.f : 0.f;
  } else if (p.weight_dtype == DType::kBFloat16) {
    load(Type<bf16>{});
  } else if (p.weight_dtype == DType::kHalf) {
    load(Type<half>{});
  } else {
    load(Type<float>{});
  }
}

// How the rows of up to kNarrow columns are distributed over a block.
template <Access kAccess_, int kLanes_, int kAtOnce_>
struct Narrow {
  static constexpr Access kAccess = kAccess_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kAtOnce = kAtOnce_;                      // rows that a thread loads at once
  static constexpr int kGroups = kRowThreads / kLanes;          // rows side by side
  static constexpr int kColumns = kLanes * 8;                   // of a row, at least V
  static constexpr int64_t kRows = int64_t{kGroups} * kAtOnce;  // of a block per iteration

  __device__ static int group() { return threadIdx.x / kLanes; }
  // This thread's first column.
  __device__ static int column() { return threadIdx.x % kLanes * 8; }
};

// Sums over the threads of a row.
template <class L>
class RowSums {
 public:
  __device__ __forceinline__ float operator()(float x, float (&s_warps)[2][kRowWarps]) {
    if constexpr (L::kLanes <= 32)
      return sum_of_lanes<L::kLanes>(x);
    else
      return warp_sums_(x, s_warps);
  }

 private:
  WarpSums<L::kLanes> warp_sums_;
};

// Calls f(Type<T>, Narrow<...>) for V up to kNarrow.
template <int kAtOnce, class F>
void with_narrow(const Norm& p, F&& f) {
  with_dtype(p.dtype, [&](auto type) {
    if (!p.aligned) {
      if (p.width <= 256) return f(type, Narrow<Access::kGeneral, 32, kAtOnce>{});
      return f(type, Narrow<Access::kGeneral, 256, kAtOnce>{});
    }
    if (p.width <= 64) return f(type, Narrow<Access::kFast, 8, kAtOnce>{});
    if (p.width <= 128) return f(type, Narrow<Access::kFast, 16, kAtOnce>{});
    if (p.width <= 256) return f(type, Narrow<Access::kFast, 32, kAtOnce>{});
    if (p.width <= 512) return f(type, Narrow<Access::kFast, 64, kAtOnce>{});
    if (p.width <= 1024) return f(type, Narrow<Access::kFast, 128, kAtOnce>{});
    return f(type, Narrow<Access::kFast, 256, kAtOnce>{});
  });
}

// kHasStream: whether a kernel has a residual stream, of type S. Normed: the type whose rows are
// normed.
template <class S>
constexpr bool kHasStream = !std::is_void_v<S>;
template <class T, class S>
using Normed = std::conditional_t<kHasStream<S>, S, T>;

// Calls f(Type<T>, Type<S>), where S is the dtype of a residual stream: T or fp32.
template <class F>
void with_stream(const Norm& p, F&& f) {
  with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!std::is_same_v<T, float>) {
      if (p.stream_dtype == DType::kFloat) return f(type, Type<float>{});
    }
    f(type, type);
  });
}

// Calls f(Type<T>, Type<S>, Narrow<...>) for V up to kNarrow. A stream is wider than a head, so a
// few widths of rows suffice.
template <int kAtOnce, class F>
void with_narrow_stream(const Norm& p, F&& f) {
  with_stream(p, [&](auto type, auto stream) {
    if (!p.aligned) return f(type, stream, Narrow<Access::kGeneral, 256, kAtOnce>{});
    if (p.width <= 256) return f(type, stream, Narrow<Access::kFast, 32, kAtOnce>{});
    if (p.width <= 1024) return f(type, stream, Narrow<Access::kFast, 128, kAtOnce>{});
    return f(type, stream, Narrow<Access::kFast, 256, kAtOnce>{});
  });
}

// Calls f(Type<T>, Constant<Access>) for wider rows.
template <class F>
void with_wide(const Norm& p, F&& f) {
  with_dtype(p.dtype, [&](auto type) {
    if (p.aligned)
      f(type, Constant<Access::kFast>{});
    else
      f(type, Constant<Access::kGeneral>{});
  });
}

template <class F>
void with_wide_stream(const Norm& p, F&& f) {
  with_stream(p, [&](auto type, auto stream) {
    if (p.aligned)
      f(type, stream, Constant<Access::kFast>{});
    else
      f(type, stream, Constant<Access::kGeneral>{});
  });
}

// The number of blocks if an iteration takes `rows` rows; at most `most`.
inline int64_t norm_blocks(const Norm& p, int64_t rows, int64_t most) {
  const int64_t blocks = (p.rows + rows - 1) / rows;
  return blocks < most ? blocks : most;
}

}  // namespace gla_ext::cuda
