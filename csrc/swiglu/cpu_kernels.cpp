// SwiGLU of the pieces of a task, with s = σ(gate):
//   y = gate s up      dgate = dy s (1 + gate (1 − s)) up      dup = dy gate s
//
// reads   gate, up, backward dy [rows, D]
// writes  y; or dgate, dup and, where asked for, y [rows, D]
// Everything is computed in T and rounded once. An element's bits depend on nothing but itself: the
// tail of a piece goes through the same vector code.
#include "cpu_kernels.h"

#include "cpu/kernel_tables.h"
#include "cpu/kernels/activation.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

constexpr int64_t kWorkspace = 3 * padded(kSwigluPiece);

// Calls f(row, first column, count) for the pieces of a task.
template <typename F>
inline void for_pieces(const Swiglu& p, int64_t task, F f) {
  const int64_t first = task * p.pieces_per_task, all = p.rows * p.pieces_in_row;
  for (int64_t piece = first; piece < first + p.pieces_per_task && piece < all; ++piece) {
    const int64_t row = piece / p.pieces_in_row;
    const int64_t column = piece % p.pieces_in_row * kSwigluPiece;
    const int64_t left = p.width - column;
    f(row, column, left < kSwigluPiece ? left : kSwigluPiece);
  }
}

// dst[padded(count)] <- `count` elements of a row, then zeros.
template <typename T>
inline void load_piece(T* dst, const Swiglu& p, const StridedRows& rows, int64_t row,
                       int64_t column, int64_t count) {
  const int64_t offset = row_offset(rows.strides, p.inner_rows, row) + column;
  convert_row(dst, rows.data, p.dtype, offset, count);
  std::memset(dst + count, 0, (padded(count) - count) * sizeof(T));
}

template <typename T>
void forward(const Swiglu& p, T* workspace, int64_t task) {
  T *gate = workspace, *up = gate + padded(kSwigluPiece);
  for_pieces(p, task, [&](int64_t row, int64_t column, int64_t count) {
    load_piece(gate, p, p.gate, row, column, count);
    load_piece(up, p, p.up, row, column, count);
    map<T>(
        padded(count),
        [](Vec<T> g, Vec<T> u) { return activated(Activation::kSwish, g).value * u; }, up, gate,
        up);
    convert_row_back(p.y, p.dtype, row * p.width + column, up, count);
  });
}

template <typename T>
void backward(const Swiglu& p, T* workspace, int64_t task) {
  T *gate = workspace, *up = gate + padded(kSwigluPiece), *dy = up + padded(kSwigluPiece);
  for_pieces(p, task, [&](int64_t row, int64_t column, int64_t count) {
    load_piece(gate, p, p.gate, row, column, count);
    load_piece(up, p, p.up, row, column, count);
    load_piece(dy, p, p.dy, row, column, count);
    for (int64_t i = 0; i < padded(count); i += Vec<T>::size()) {
      const Vec<T> u = Vec<T>::loadu(up + i), grad = Vec<T>::loadu(dy + i);
      const auto [silu, slope] = activated(Activation::kSwish, Vec<T>::loadu(gate + i));
      (grad * slope * u).store(gate + i);
      (grad * silu).store(dy + i);
      (silu * u).store(up + i);
    }
    const int64_t offset = row * p.width + column;
    convert_row_back(p.dgate, p.dtype, offset, gate, count);
    convert_row_back(p.dup, p.dtype, offset, dy, count);
    if (p.y != nullptr) convert_row_back(p.y, p.dtype, offset, up, count);
  });
}

}  // namespace CPU_CAPABILITY

template <>
const SwigluKernels<float> KernelTables<SwigluKernels<float>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::kWorkspace, CPU_CAPABILITY::forward<float>, CPU_CAPABILITY::backward<float>};
template <>
const SwigluKernels<double> KernelTables<SwigluKernels<double>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::kWorkspace, CPU_CAPABILITY::forward<double>, CPU_CAPABILITY::backward<double>};

}  // namespace gla_ext::cpu
