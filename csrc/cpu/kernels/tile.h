// The basic helpers of the CPU kernels: padded tiles, conversions between memory and tiles, and
// transposes.
//
// A tile is a row-major matrix whose leading dimension is a multiple of kPad elements and whose
// columns beyond the data are zero, so that inner loops have no tails.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>

#include "common/rows.h"
#include "cpu/host/params.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
using Vec = at::vec::Vectorized<T>;

// out[i] = f(a[i], ...) over n elements, n a multiple of the vector length.
template <typename T, typename F, typename... In>
inline void map(int64_t n, F f, T* out, const In*... in) {
  for (int64_t i = 0; i < n; i += Vec<T>::size()) f(Vec<T>::loadu(in + i)...).store(out + i);
}

// The sum of the lanes, in their order, in T or a wider type.
template <typename T, typename Sum = T>
inline Sum sum_of_lanes(const Vec<T>& x) {
  T lanes[Vec<T>::size()];
  x.store(lanes);
  Sum sum = 0;
  for (const T lane : lanes) sum += lane;
  return sum;
}

template <typename T>
inline T largest_lane(const Vec<T>& x) {
  T lanes[Vec<T>::size()];
  x.store(lanes);
  T largest = lanes[0];
  for (const T lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

// Whether no lane is above `limit`; false for NaN.
template <typename T>
inline bool all_at_most(const Vec<T>& x, T limit) {
  T lanes[Vec<T>::size()];
  x.store(lanes);
  bool all = true;
  for (const T lane : lanes) all = all && lane <= limit;
  return all;
}

template <typename T>
inline void fill(T* out, int64_t n, T value) {
  for (int64_t i = 0; i < n; ++i) out[i] = value;
}

// Functions for map.
struct Times {
  template <typename V>
  V operator()(const V& x, const V& y) const {
    return x * y;
  }
};
struct AddProduct {
  template <typename V>
  V operator()(const V& x, const V& y, const V& sum) const {
    return at::vec::fmadd(x, y, sum);
  }
};

// memcpy for rows, which are short and copied by the hundred per chunk.
template <typename T>
inline void copy_row(T* dst, const T* src, int64_t n) {
  int64_t i = 0;
  for (; i <= n - Vec<T>::size(); i += Vec<T>::size()) Vec<T>::loadu(src + i).store(dst + i);
  for (; i < n; ++i) dst[i] = src[i];
}

template <typename T>
inline void convert_row(T* dst, const void* src, DType dtype, int64_t offset, int64_t n) {
  const auto widen = [&](const auto* p, const auto& load) {
    Vec<float> value;
    int64_t i = 0;
    for (; i <= n - Vec<float>::size(); i += Vec<float>::size()) {
      load(p + i, value);
      value.store(dst + i);
    }
    for (; i < n; ++i) dst[i] = static_cast<float>(p[i]);
  };
  if constexpr (std::is_same_v<T, double>) {
    copy_row(dst, static_cast<const double*>(src) + offset, n);
  } else if (dtype == DType::kFloat) {
    copy_row(dst, static_cast<const float*>(src) + offset, n);
  } else if (dtype == DType::kBFloat16) {
    widen(static_cast<const c10::BFloat16*>(src) + offset,
          [](const auto* p, auto& value) { at::vec::load_fp32_from_bf16(p, value); });
  } else {
    widen(static_cast<const c10::Half*>(src) + offset,
          [](const auto* p, auto& value) { at::vec::load_fp32_from_fp16(p, value); });
  }
}

template <typename T>
inline void convert_row_back(void* dst, DType dtype, int64_t offset, const T* src, int64_t n) {
  if constexpr (std::is_same_v<T, double>) {
    copy_row(static_cast<double*>(dst) + offset, src, n);
  } else if (dtype == DType::kFloat) {
    copy_row(static_cast<float*>(dst) + offset, src, n);
  } else if (dtype == DType::kBFloat16) {
    at::vec::convert(src, static_cast<c10::BFloat16*>(dst) + offset, n);
  } else {
    at::vec::convert(src, static_cast<c10::Half*>(dst) + offset, n);
  }
}

// dst[L, ld] <- rows of one chunk; columns D..ld become zero.
template <typename T>
inline void load_rows(T* dst, int64_t ld, const Rows& rows, const Chunk& chunk, int64_t D) {
  const int64_t base = chunk.row * rows.stride_b + rows.head_offset(chunk.head);
  for (int64_t i = 0; i < chunk.length; ++i) {
    convert_row(dst + i * ld, rows.data, rows.dtype, base + (chunk.start + i) * rows.stride_t, D);
    std::memset(dst + i * ld + D, 0, (ld - D) * sizeof(T));
  }
}

template <typename T>
inline void store_rows(const Rows& rows, const Chunk& chunk, int64_t D, const T* src, int64_t ld) {
  const int64_t base = chunk.row * rows.stride_b + rows.head_offset(chunk.head);
  for (int64_t i = 0; i < chunk.length; ++i)
    convert_row_back(rows.data, rows.dtype, base + (chunk.start + i) * rows.stride_t, src + i * ld,
                     D);
}

// Rounds to bf16 and back, in place: the operand a tensor core would see.
template <typename T>
inline void round_to_bf16(T* x, int64_t n) {
  if constexpr (std::is_same_v<T, float>) {
    c10::BFloat16 buffer[64];
    for (int64_t i = 0; i < n; i += 64) {
      const int64_t m = n - i < 64 ? n - i : 64;
      at::vec::convert(x + i, buffer, m);
      convert_row(x + i, buffer, DType::kBFloat16, 0, m);
    }
  }
}

// dst[L, ld] = src ⊙ factor, rounded if `round`.
template <typename T>
inline void gated(T* dst, const T* src, const T* factor, int64_t n, bool round) {
  map<T>(n, Times(), dst, src, factor);
  if (round) round_to_bf16(dst, n);
}

// dst[padded(cols), ld_dst] = transpose of src[rows, ld_src], ld_src >= padded(cols); dst columns
// rows..padded(rows) become zero.
template <typename T>
inline void transpose(T* dst, int64_t ld_dst, const T* src, int64_t ld_src, int64_t rows,
                      int64_t cols) {
  for (int64_t i = 0; i < rows; i += kPad) {
    const int64_t m = rows - i < kPad ? rows - i : kPad;
    for (int64_t j = 0; j < cols; j += kPad) {
      const T* block = src + i * ld_src + j;
      T* to = dst + j * ld_dst + i;
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
      if constexpr (std::is_same_v<T, float>) {
        if (m == kPad) {
          at::vec::transpose_mxn<float, kPad, kPad>(block, ld_src, to, ld_dst);
          continue;
        }
      }
#endif
      for (int64_t c = 0; c < kPad; ++c)
        for (int64_t r = 0; r < kPad; ++r)
          to[c * ld_dst + r] = r < m ? block[r * ld_src + c] : T(0);
    }
  }
}

// The dtype of a state in memory, unless it is stored in a shorter one.
template <typename T>
constexpr DType kAccumulated = std::is_same_v<T, double> ? DType::kDouble : DType::kFloat;

// dst[K, ld] <- one [K, V] (or [V, K]) matrix; the V..ld columns become zero. src == nullptr: zero.
// `buffer` has room for a row of it.
template <typename T>
inline void load_state(T* dst, int64_t ld, const void* src, DType dtype, bool v_first, int64_t K,
                       int64_t V, T* buffer) {
  std::memset(dst, 0, K * ld * sizeof(T));
  if (src == nullptr) return;
  const int64_t rows = v_first ? V : K, columns = v_first ? K : V;
  for (int64_t i = 0; i < rows; ++i) {
    convert_row(v_first ? buffer : dst + i * ld, src, dtype, i * columns, columns);
    if (v_first)
      for (int64_t j = 0; j < columns; ++j) dst[j * ld + i] = buffer[j];
  }
}

template <typename T>
inline void store_state(void* dst, DType dtype, bool v_first, int64_t K, int64_t V, const T* src,
                        int64_t ld, T* buffer) {
  const int64_t rows = v_first ? V : K, columns = v_first ? K : V;
  for (int64_t i = 0; i < rows; ++i) {
    if (v_first)
      for (int64_t j = 0; j < columns; ++j) buffer[j] = src[j * ld + i];
    convert_row_back(dst, dtype, i * columns, v_first ? buffer : src + i * ld, columns);
  }
}

// Calls f(row) for the rows of a task.
template <class Problem, typename F>
inline void for_rows(const Problem& p, int64_t task, F f) {
  const int64_t first = task * p.rows_per_task, end = first + p.rows_per_task;
  for (int64_t row = first; row < (end < p.rows ? end : p.rows); ++row) f(row);
}
inline int64_t row_offset(const RowStrides& strides, int64_t inner_rows, int64_t row) {
  return row / inner_rows * strides.outer + row % inner_rows * strides.inner;
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
