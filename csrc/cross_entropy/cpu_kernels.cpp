// Cross entropy of a range of rows. csrc/common/cross_entropy.h defines it and s, the scaled or
// capped logits. ls is its `smoothing`, z its `square`:
//   lse = log sum(exp s)      loss = lse − (1 − ls) s_y − ls mean(s) + z lse²
// and backward, with p = exp(s − lse):
//   dx = dloss ((1 + 2 z lse) p − ls / V − (1 − ls) [i = y]) ds/dx
//
// reads   x [N, V], labels y [N], backward dloss, lse [N]
// writes  loss, z lse², lse [N]; dx [N, V], which may lie where x lies
// Elements are computed in T and rounded once; the lanes of a row's sum are added in fp64, and lse
// and the loss are computed in fp64.
#include "cpu_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/kernel_tables.h"
#include "cpu/kernels/tile.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

inline int64_t cross_entropy_workspace(int64_t V) { return 2 * padded(V); }

// s[padded(V)] of a row, then -inf; and ds/dx, if it is wanted.
template <typename T>
inline void load_scaled_row(T* s, T* slope, const CrossEntropy<T>& p, int64_t row) {
  const int64_t Vp = padded(p.width);
  convert_row(s, p.logits, p.dtype, row * p.stride, p.width);
  std::fill(s + p.width, s + Vp, T(0));
  const Vec<T> scale(static_cast<T>(p.options.scale)), one(T(1));
  if (p.options.cap == 0) {
    map<T>(Vp, [&](Vec<T> x) { return x * scale; }, s, s);
    if (slope != nullptr) std::fill(slope, slope + Vp, static_cast<T>(p.options.scale));
  } else {
    const Vec<T> cap(static_cast<T>(p.options.cap));
    map<T>(Vp, [&](Vec<T> x) { return (x * scale / cap).tanh(); }, s, s);
    if (slope != nullptr) map<T>(Vp, [&](Vec<T> t) { return scale * (one - t * t); }, slope, s);
    map<T>(Vp, [&](Vec<T> t) { return cap * t; }, s, s);
  }
  std::fill(s + p.width, s + Vp, -std::numeric_limits<T>::infinity());
}

template <typename T>
void forward(const CrossEntropy<T>& p, T* s, int64_t task) {
  for_rows(p, task, [&](int64_t row) {
    const int64_t label = p.target[row];
    p.loss[row] = p.z_loss[row] = p.lse[row] = 0;
    if (label == p.options.ignored) return;
    load_scaled_row<T>(s, nullptr, p, row);
    T largest = s[0];
    double total = 0;
    for (int64_t i = 0; i < p.width; ++i) largest = s[i] > largest ? s[i] : largest;
    if (p.options.smoothing != 0)
      for (int64_t i = 0; i < p.width; ++i) total += s[i];
    const Vec<T> most(largest);
    Vec<T> sums(T(0));
    for (int64_t i = 0; i < padded(p.width); i += Vec<T>::size())
      sums = sums + (Vec<T>::loadu(s + i) - most).exp();
    const double sum = sum_of_lanes<T, double>(sums);
    const double lse = largest + std::log(sum), smoothing = p.options.smoothing;
    const double z_loss = p.options.square * lse * lse;
    double loss = lse - (1 - smoothing) * s[label] + z_loss;
    if (smoothing != 0) loss -= smoothing * total / static_cast<double>(p.width);
    p.loss[row] = static_cast<T>(loss);
    p.z_loss[row] = static_cast<T>(z_loss);
    p.lse[row] = static_cast<T>(lse);
  });
}

template <typename T>
void backward(const CrossEntropy<T>& p, T* s, int64_t task) {
  T* slope = s + padded(p.width);
  for_rows(p, task, [&](int64_t row) {
    const int64_t label = p.target[row];
    const int64_t offset = row * p.dlogits_stride;
    if (label == p.options.ignored) {
      std::fill(s, s + p.width, T(0));
      return convert_row_back(p.dlogits, p.dtype, offset, s, p.width);
    }
    load_scaled_row(s, slope, p, row);
    const double smoothing = p.options.smoothing;
    const Vec<T> lse(p.lse[row]), dloss(p.dloss[row]);
    const Vec<T> of_p(static_cast<T>(1 + 2 * p.options.square * p.lse[row]));
    const Vec<T> uniform(static_cast<T>(smoothing / static_cast<double>(p.width)));
    const T before = s[label];
    map<T>(
        padded(p.width),
        [&](Vec<T> x, Vec<T> d) { return dloss * (of_p * (x - lse).exp() - uniform) * d; }, s, s,
        slope);
    const T at_label =
        static_cast<T>((1 + 2 * p.options.square * p.lse[row]) * std::exp(before - p.lse[row]) -
                       smoothing / static_cast<double>(p.width) - (1 - smoothing));
    s[label] = p.dloss[row] * at_label * slope[label];
    convert_row_back(p.dlogits, p.dtype, offset, s, p.width);
  });
}

}  // namespace CPU_CAPABILITY

template <>
const CrossEntropyKernels<float> KernelTables<CrossEntropyKernels<float>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::cross_entropy_workspace, CPU_CAPABILITY::forward<float>,
    CPU_CAPABILITY::backward<float>};
template <>
const CrossEntropyKernels<double> KernelTables<CrossEntropyKernels<double>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::cross_entropy_workspace, CPU_CAPABILITY::forward<double>,
    CPU_CAPABILITY::backward<double>};

}  // namespace gla_ext::cpu
