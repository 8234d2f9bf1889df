// From tensors to what kernels take, and what every operator on CUDA refuses.
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

// Contiguous indices, which the caller holds.
inline Indices indices_of(const OptionalTensor& t) {
  if (!given(t)) return {};
  return {t->const_data_ptr(), t->scalar_type() == at::kLong};
}

// Lets H heads read those of `rows`, `heads` in number, a divisor of H.
void share_heads(const char* op, Rows& rows, int64_t heads, int64_t H);

void check_not_fp64(const char* op, at::ScalarType accumulate);
// A GPU that the kernels are built for.
void check_gpu(const char* op, at::Device device);
// Both, and K and V up to kMaxHeadDim.
void check_supported(const char* op, const Shape& shape, at::Device device);

int multiprocessors_of(at::Device device);

}  // namespace gla_ext::cuda
