// The gate's low-rank projection, of the rows of a task:
//   z = h Wᵀ + b      g = max(logsigmoid(z) / τ, c)
// and backward, with dz = dg σ(−z) / τ where g is not clamped:
//   dh = dz W      dW = Σ dzᵀ h      db = Σ dz
//
// reads   h [rows, R], W transposed [R, K], b [K], backward dg [rows, K]
// writes  g [rows, K]; dh [rows, R], and dW and db of the task's rows [R + 1, K]
// Everything is accumulated in T and rounded once.
#include "cpu_kernels.h"

#include "cpu/kernel_tables.h"
#include "cpu/kernels/activation.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

inline int64_t gate_projection_workspace(int64_t R, int64_t K) { return padded(R) + padded(K); }

template <typename T>
inline int64_t row_offset(const StridedRows& rows, int64_t inner_rows, int64_t row) {
  return row / inner_rows * rows.strides.outer + row % inner_rows * rows.strides.inner;
}

// Calls f(row) for the rows of a task.
template <typename T, typename F>
inline void for_rows(const GateProjection<T>& p, int64_t task, F f) {
  const int64_t first = task * p.rows_per_task, end = first + p.rows_per_task;
  for (int64_t row = first; row < (end < p.rows ? end : p.rows); ++row) f(row);
}

// h of a row as numbers of T.
template <typename T>
inline void load_h(T* h, const GateProjection<T>& p, int64_t row) {
  convert_row(h, p.h.data, p.dtype, row_offset<T>(p.h, p.h_inner_rows, row), p.rank);
}

// z of columns i to i + lanes.
template <typename T>
inline Vec<T> gate_logits(const GateProjection<T>& p, const T* h, int64_t i) {
  const int64_t Kp = padded(p.width);
  Vec<T> z = Vec<T>::loadu(p.bias + i);
  for (int64_t r = 0; r < p.rank; ++r)
    z = at::vec::fmadd(Vec<T>(h[r]), Vec<T>::loadu(p.weight + r * Kp + i), z);
  return z;
}

template <typename T>
void forward(const GateProjection<T>& p, T* h, int64_t task) {
  T* g = h + padded(p.rank);
  const Vec<T> per_normalizer(p.per_normalizer), least(p.clamp_min);
  for_rows(p, task, [&](int64_t row) {
    load_h(h, p, row);
    for (int64_t i = 0; i < padded(p.width); i += Vec<T>::size()) {
      const Vec<T> x =
          activated(Activation::kLogSigmoid, gate_logits(p, h, i)).value * per_normalizer;
      Vec<T>::blendv(x, least, x < least).store(g + i);
    }
    convert_row_back(p.g, p.dtype, row * p.width, g, p.width);
  });
}

template <typename T>
void backward(const GateProjection<T>& p, T* h, int64_t task) {
  const int64_t Kp = padded(p.width);
  T *dz = h + padded(p.rank), *parts = p.parts + task * (p.rank + 1) * Kp;
  const Vec<T> per_normalizer(p.per_normalizer), least(p.clamp_min), zero(T(0));
  fill(parts, (p.rank + 1) * Kp, T(0));
  for_rows(p, task, [&](int64_t row) {
    load_h(h, p, row);
    convert_row(dz, p.dg.data, p.dtype, row_offset<T>(p.dg, p.dg_inner_rows, row), p.width);
    std::memset(dz + p.width, 0, (Kp - p.width) * sizeof(T));
    for (int64_t i = 0; i < Kp; i += Vec<T>::size()) {
      const auto [value, slope] = activated(Activation::kLogSigmoid, gate_logits(p, h, i));
      const Vec<T> d = Vec<T>::loadu(dz + i) * slope * per_normalizer;
      Vec<T>::blendv(d, zero, value * per_normalizer < least).store(dz + i);
    }
    T* dbias = parts + p.rank * Kp;
    map<T>(Kp, [](Vec<T> sum, Vec<T> d) { return sum + d; }, dbias, dbias, dz);
    for (int64_t r = 0; r < p.rank; ++r) {
      const Vec<T> of_h(h[r]);
      T* dweight = parts + r * Kp;
      Vec<T> sums(T(0));
      for (int64_t i = 0; i < Kp; i += Vec<T>::size()) {
        const Vec<T> d = Vec<T>::loadu(dz + i);
        sums = at::vec::fmadd(d, Vec<T>::loadu(p.weight + r * Kp + i), sums);
        at::vec::fmadd(of_h, d, Vec<T>::loadu(dweight + i)).store(dweight + i);
      }
      T lanes[Vec<T>::size()];
      sums.store(lanes);
      T sum = 0;
      for (const T lane : lanes) sum += lane;
      h[r] = sum;  // which is read no more
    }
    convert_row_back(p.dh, p.dtype, row * p.rank, h, p.rank);
  });
}

}  // namespace CPU_CAPABILITY

template <>
const GateProjectionKernels<float> KernelTables<GateProjectionKernels<float>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::gate_projection_workspace, CPU_CAPABILITY::forward<float>,
    CPU_CAPABILITY::backward<float>};
template <>
const GateProjectionKernels<double> KernelTables<GateProjectionKernels<double>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::gate_projection_workspace, CPU_CAPABILITY::forward<double>,
    CPU_CAPABILITY::backward<double>};

}  // namespace gla_ext::cpu
