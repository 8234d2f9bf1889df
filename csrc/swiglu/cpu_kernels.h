// SwiGLU on CPU: the kernels' arguments, and how the host calls them.
#pragma once

#include "common/rows.h"
#include "cpu/host/params.h"

namespace gla_ext::cpu {

constexpr int64_t kSwigluPiece = 1024;  // elements of a row at a time: three fit into L1

struct Swiglu {
  int64_t rows = 0, inner_rows = 1, width = 0;
  int64_t pieces_in_row = 1, pieces_per_task = 1;
  DType dtype = DType::kFloat;  // of all rows

  StridedRows gate, up, dy;                             // inputs [rows, width]
  void *y = nullptr, *dgate = nullptr, *dup = nullptr;  // outputs [rows, width], contiguous
};

// A task is some pieces of rows. Everything is computed in T: float, or double for fp64 inputs.
template <typename T>
struct SwigluKernels {
  using Task = void (*)(const Swiglu&, T* workspace, int64_t task);
  int64_t workspace;  // elements
  Task forward;       // gate up -> y
  Task backward;      // dy gate up -> dgate dup y
};

}  // namespace gla_ext::cpu
