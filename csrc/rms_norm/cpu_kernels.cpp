// The root mean square norm of the rows of a task, times a weight and an activated gate:
//   n = x rstd      y = n ⊙ w ⊙ f(gate)      rstd = (mean(x²) + eps)^-0.5
// and backward, with u = dy ⊙ w ⊙ f(gate):
//   dgate = dy ⊙ n ⊙ w ⊙ f'(gate)      dx = rstd (u − n mean(u ⊙ n))      dw = Σ dy ⊙ f(gate) ⊙ n
//
// reads   x, gate, dy [rows, V], w [V], backward rstd [rows]
// writes  y [rows, V], rstd [rows]; backward dx, dgate [rows, V], dw of the task's rows [V], and y
//         again where it is asked for
// Everything is accumulated in T and rounded once. With a residual, x is the sum of both, rounded
// and written as the stream, and dx has the stream's gradient added.
#include "cpu_kernels.h"

#include <cmath>

#include "cpu/kernel_tables.h"
#include "cpu/kernels/activation.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

inline int64_t norm_workspace(int64_t V) { return 4 * padded(V); }

// dst[padded(V)] <- a row, then zeros.
template <typename T>
inline void load_norm_row(T* dst, const Norm<T>& p, const NormRows& rows, int64_t row) {
  convert_row(dst, rows.data, rows.dtype, row_offset(rows.strides, p.inner_rows, row), p.width);
  std::memset(dst + p.width, 0, (padded(p.width) - p.width) * sizeof(T));
}

template <typename T>
inline void store_norm_row(const T* src, const Norm<T>& p, const NormRows& rows, int64_t row) {
  convert_row_back(rows.data, rows.dtype, row_offset(rows.strides, p.inner_rows, row), src,
                   p.width);
}

// x becomes the stream: residual + x, rounded as it is stored.
template <typename T>
inline void add_residual_row(const Norm<T>& p, int64_t row, T* x, T* residual) {
  load_norm_row(residual, p, p.residual, row);
  map<T>(padded(p.width), [](Vec<T> r, Vec<T> v) { return r + v; }, x, residual, x);
  store_norm_row(x, p, p.stream, row);
  load_norm_row(x, p, p.stream, row);
}

// The gradient of the row's norm plus that of the stream is the gradient of both residual and x.
template <typename T>
inline void store_residual_grads(const Norm<T>& p, int64_t row, T* u, T* dstream) {
  if (p.dstream.data != nullptr) {
    load_norm_row(dstream, p, p.dstream, row);
    map<T>(padded(p.width), [](Vec<T> v, Vec<T> d) { return v + d; }, u, u, dstream);
  }
  store_norm_row(u, p, p.dresidual, row);
  if (p.dx.data != nullptr) store_norm_row(u, p, p.dx, row);
}

// Sums in fp64, as a rounding error here would be in the whole row.
template <typename T>
inline double mean_of(const Norm<T>& p, const Vec<T>& sums) {
  return sum_of_lanes<T, double>(sums) / static_cast<double>(p.width);
}

template <typename T>
void forward(const Norm<T>& p, T* workspace, int64_t task) {
  const int64_t Vp = padded(p.width);
  T *x = workspace, *gate = x + Vp;
  for_rows(p, task, [&](int64_t row) {
    load_norm_row(x, p, p.x, row);
    if (p.residual.data != nullptr) add_residual_row(p, row, x, gate);
    Vec<T> squares(T(0));
    for (int64_t i = 0; i < Vp; i += Vec<T>::size()) {
      const Vec<T> v = Vec<T>::loadu(x + i);
      squares = at::vec::fmadd(v, v, squares);
    }
    const T rstd = static_cast<T>(1 / std::sqrt(mean_of(p, squares) + p.eps));
    p.rstd[row] = rstd;
    map<T>(Vp, [&](Vec<T> v) { return v * Vec<T>(rstd); }, x, x);
    if (p.weight != nullptr) map<T>(Vp, [](Vec<T> v, Vec<T> w) { return v * w; }, x, x, p.weight);
    if (p.gate.data != nullptr) {
      load_norm_row(gate, p, p.gate, row);
      map<T>(
          Vp, [&](Vec<T> v, Vec<T> g) { return v * activated(p.activation, g).value; }, x, x, gate);
    }
    store_norm_row(x, p, p.y, row);
  });
}

template <typename T>
void backward(const Norm<T>& p, T* workspace, int64_t task) {
  const int64_t Vp = padded(p.width);
  T *n = workspace, *u = n + Vp, *gate = u + Vp, *y = gate + Vp;
  T* dweight = p.weight == nullptr ? nullptr : p.dweight_parts + task * Vp;
  if (dweight != nullptr) fill(dweight, Vp, T(0));
  for_rows(p, task, [&](int64_t row) {
    load_norm_row(n, p, p.x, row);
    load_norm_row(u, p, p.dy, row);
    const Vec<T> rstd(p.rstd[row]);
    if (p.gate.data != nullptr) load_norm_row(gate, p, p.gate, row);
    Vec<T> products(T(0));
    for (int64_t i = 0; i < Vp; i += Vec<T>::size()) {
      const Vec<T> normed = Vec<T>::loadu(n + i) * rstd;
      Vec<T> grad = Vec<T>::loadu(u + i), gate_grad, activation(T(1));
      if (p.gate.data != nullptr) {
        const auto [value, slope] = activated(p.activation, Vec<T>::loadu(gate + i));
        gate_grad = grad * normed * slope;
        grad = grad * value;
        activation = value;
      }
      if (p.y.data != nullptr) {  // in the order of forward
        const Vec<T> weight = p.weight == nullptr ? Vec<T>(T(1)) : Vec<T>::loadu(p.weight + i);
        (normed * weight * activation).store(y + i);
      }
      if (dweight != nullptr) {
        const Vec<T> weight = Vec<T>::loadu(p.weight + i);
        at::vec::fmadd(grad, normed, Vec<T>::loadu(dweight + i)).store(dweight + i);
        gate_grad = gate_grad * weight;
        grad = grad * weight;
      }
      if (p.gate.data != nullptr) gate_grad.store(gate + i);
      normed.store(n + i);
      grad.store(u + i);
      products = at::vec::fmadd(grad, normed, products);
    }
    if (p.gate.data != nullptr) store_norm_row(gate, p, p.dgate, row);
    if (p.y.data != nullptr) store_norm_row(y, p, p.y, row);
    const Vec<T> mean(static_cast<T>(mean_of(p, products)));
    for (int64_t i = 0; i < Vp; i += Vec<T>::size()) {
      const Vec<T> along = Vec<T>::loadu(n + i).neg();
      (rstd * at::vec::fmadd(along, mean, Vec<T>::loadu(u + i))).store(u + i);
    }
    if (p.dresidual.data != nullptr)
      store_residual_grads(p, row, u, gate);
    else
      store_norm_row(u, p, p.dx, row);
  });
}

}  // namespace CPU_CAPABILITY

template <>
const NormKernels<float> KernelTables<NormKernels<float>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::norm_workspace, CPU_CAPABILITY::forward<float>,
    CPU_CAPABILITY::backward<float>};
template <>
const NormKernels<double> KernelTables<NormKernels<double>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::norm_workspace, CPU_CAPABILITY::forward<double>,
    CPU_CAPABILITY::backward<double>};

}  // namespace gla_ext::cpu
