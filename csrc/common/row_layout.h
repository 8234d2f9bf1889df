// Tensors of one shape as rows, for backends.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "rows.h"

namespace gla_ext {

// Tensors of one shape [..., V] as rows of V contiguous elements. Tensors whose rows need more than
// two strides are copied.
struct RowLayout {
  int64_t rows = 0, inner_rows = 1, width = 1;
  std::vector<at::Tensor> tensors;
  std::vector<RowStrides> strides;

  // Tensor i.
  StridedRows input(size_t i) const { return {tensors[i].const_data_ptr(), strides[i]}; }
};
RowLayout lay_out_rows(std::vector<at::Tensor> tensors);

// lay_out_rows for kernels that do not depend on rows: contiguous tensors become one row. No tensor
// may be empty.
RowLayout lay_out_elements(std::vector<at::Tensor> tensors);

}  // namespace gla_ext
