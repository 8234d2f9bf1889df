// Converts tensors to the structs of kernels. Also the checks of every operator on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/shape.h"
#include "params.h"

namespace gla_ext::cuda {

constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;  // of a grid

DType dtype_of(at::ScalarType t);

// Whether 16 bytes can be read at once.
bool starts_aligned(const void* data);

Rows rows_of(void* data, DType dtype, at::IntArrayRef sizes, at::IntArrayRef strides);
// [B, T, H, D] whose last dimension is contiguous.
Rows rows_of(const at::Tensor& t);
bool has_contiguous_rows(const at::Tensor& t);

// Contiguous indices, which the caller keeps alive.
inline Indices indices_of(const OptionalTensor& t) {
  if (!given(t)) return {};
  return {t->const_data_ptr(), t->scalar_type() == at::kLong};
}

// Lets H heads share the `heads` heads of `rows`, a divisor of H.
void share_heads(const char* op, Rows& rows, int64_t heads, int64_t H);

void check_not_fp64(const char* op, at::ScalarType accumulate);
// Raises unless the kernels are built for this GPU.
void check_gpu(const char* op, at::Device device);
// Both checks; K and V may be at most kMaxHeadDim.
void check_supported(const char* op, const Shape& shape, at::Device device);

int multiprocessors_of(at::Device device);

}  // namespace gla_ext::cuda
