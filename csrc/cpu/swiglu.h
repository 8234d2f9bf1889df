// What the host side hands to the CPU kernels of SwiGLU.
#pragma once

#include "common/rows.h"
#include "host/params.h"

namespace gla_ext::cpu {

constexpr int64_t kSwigluPiece = 1024;  // elements of a row at a time: three fit into L1

struct Swiglu {
  int64_t rows = 0, inner_rows = 1, width = 0;
  int64_t pieces_in_row = 1, pieces_per_task = 1;
  DType dtype = DType::kFloat;  // of all rows

  StridedRows gate, up, dy;                             // inputs [rows, width]
  void *y = nullptr, *dgate = nullptr, *dup = nullptr;  // outputs [rows, width], contiguous
};

}  // namespace gla_ext::cpu
