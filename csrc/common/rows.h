// Tensors as rows, as kernels take them on every backend: plain, no torch header.
#pragma once

#include <cstdint>

namespace gla_ext {

// Row r of a tensor [..., V], r over all leading dimensions, starts at element
// r / inner_rows * outer + r % inner_rows * inner.
struct RowStrides {
  int64_t outer = 0, inner = 0;
};

// An input [rows, V] whose last dimension is contiguous.
struct StridedRows {
  const void* data = nullptr;
  RowStrides strides;
};

}  // namespace gla_ext
