#include "output.h"

#include <ATen/MemoryOverlap.h>

namespace gla_ext {

void check_out(const Checker& check, const at::Tensor& out, at::ScalarType dtype, const char* dims,
               const Sizes& sizes) {
  check.defined("out", out);
  check.strided("out", out);
  check.device("out", out);
  check.like_first("out", out, dtype);
  check.shape("out", out, dims, sizes);
}

void check_out_layout(const char* op, const at::Tensor& out,
                      std::initializer_list<NamedTensor> inputs) {
  if (out.numel() == 0) return;
  TORCH_CHECK_VALUE(
      (out.size(-1) == 1 || out.stride(-1) == 1) &&
          at::has_internal_overlap(out) != at::MemOverlap::Yes,
      op, ": expected the last dimension of out to be contiguous and no two elements of it ",
      "to be the same, got strides ", out.strides());
  for (const auto& [name, t] : inputs) {
    if (t == nullptr) continue;
    const auto status = at::get_overlap_status(out, *t);
    TORCH_CHECK_VALUE(
        status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, op,
        ": expected out to share no memory with ", name);
  }
}

}  // namespace gla_ext
