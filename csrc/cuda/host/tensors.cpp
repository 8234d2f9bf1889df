#include "tensors.h"

#include <ATen/cuda/CUDAContext.h>

#include "cuda/plan/plan.h"

namespace gla_ext::cuda {

constexpr int64_t kLoadBytes = 16;  // of one aligned load

DType dtype_of(at::ScalarType t) {
  switch (t) {
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kHalf;
    default:
      TORCH_INTERNAL_ASSERT(t == at::kFloat);
      return DType::kFloat;
  }
}

bool starts_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kLoadBytes == 0;
}

Rows rows_of(void* data, DType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  // A dimension of size 1 may have any stride; it is never used.
  const auto stride = [&](int dim) { return sizes[dim] == 1 ? 0 : strides[dim]; };
  Rows rows{.data = data,
            .stride_b = stride(0),
            .stride_t = stride(1),
            .stride_h = stride(2),
            .dtype = dtype,
            .aligned = starts_aligned(data)};
  for (int dim = 0; dim < 3; ++dim) rows.aligned &= stride(dim) * bytes_of(dtype) % kLoadBytes == 0;
  return rows;
}

Rows rows_of(const at::Tensor& t) {
  return rows_of(const_cast<void*>(t.const_data_ptr()), dtype_of(t.scalar_type()), t.sizes(),
                 t.strides());
}

bool has_contiguous_rows(const at::Tensor& t) { return t.size(3) == 1 || t.stride(3) == 1; }

void share_heads(const char* op, Rows& rows, int64_t heads, int64_t H) {
  if (heads <= 1 || heads >= H) return;  // one head's stride is 0
  constexpr int64_t kOne = int64_t{1} << 32;
  const int64_t group = H / heads;
  TORCH_CHECK_NOT_IMPLEMENTED(H <= kOne / group, op, ": expected H * (H / HK) to be at most ", kOne,
                              " on CUDA, got H = ", H, " and HK = ", heads);
  rows.group_reciprocal = static_cast<uint64_t>((kOne + group - 1) / group);
}

void check_not_fp64(const char* op, at::ScalarType accumulate) {
  TORCH_CHECK_NOT_IMPLEMENTED(accumulate != at::kDouble, op,
                              ": expected torch.bfloat16, torch.float16 or torch.float32 on CUDA, "
                              "got torch.float64, which only the CPU backend takes");
}

void check_gpu(const char* op, at::Device device) {
  const cudaDeviceProp& gpu = *at::cuda::getDeviceProperties(device.index());
  TORCH_CHECK_NOT_IMPLEMENTED(gpu.major >= 8, op,
                              ": expected a GPU of compute capability 8.0 or higher, got ",
                              gpu.name, " of ", gpu.major, ".", gpu.minor);
}

void check_supported(const char* op, const Shape& shape, at::Device device) {
  check_not_fp64(op, shape.accumulate);
  const int64_t K = shape.K.expect_int(), V = shape.V.expect_int();
  TORCH_CHECK_NOT_IMPLEMENTED(K <= kMaxHeadDim && V <= kMaxHeadDim, op,
                              ": expected K and V to be at most ", kMaxHeadDim,
                              " on CUDA, got K = ", K, " and V = ", V);
  check_gpu(op, device);
}

int multiprocessors_of(at::Device device) {
  return at::cuda::getDeviceProperties(device.index())->multiProcessorCount;
}

}  // namespace gla_ext::cuda
