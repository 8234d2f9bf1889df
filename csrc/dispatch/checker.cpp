#include "checker.h"

#include <cmath>

namespace gla_ext {

std::string dtype_name(at::ScalarType t) {
  switch (t) {
    case at::kBFloat16:
      return "torch.bfloat16";
    case at::kHalf:
      return "torch.float16";
    case at::kFloat:
      return "torch.float32";
    case at::kDouble:
      return "torch.float64";
    case at::kBool:
      return "torch.bool";
    case at::kByte:
      return "torch.uint8";
    case at::kInt:
      return "torch.int32";
    case at::kLong:
      return "torch.int64";
    default:
      return c10::str("torch.", c10::toString(t));
  }
}

void check_defined(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), op, ": expected ", name, " to be a tensor, got None");
}

double resolve_scale(std::optional<double> scale, int64_t K) {
  return scale.has_value() ? *scale : 1 / std::sqrt(static_cast<double>(K));
}

void Checker::placed(const NamedTensors& tensors, const NamedTensors& others) const {
  const auto each = [&](const auto& f) {
    for_each_given(tensors, f);
    for_each_given(others, f);
  };
  each([&](const char* name, const at::Tensor& t) { defined(name, t); });
  each([&](const char* name, const at::Tensor& t) { strided(name, t); });
  each([&](const char* name, const at::Tensor& t) { device(name, t); });
}

void Checker::alike(const NamedTensors& tensors, const NamedTensors& others) const {
  const at::Tensor& first = *tensors.at(0).second;
  placed(tensors, others);
  floating(first_name_, first);
  for_each_given(tensors, [&](const char* name, const at::Tensor& t) {
    like_first(name, t, first.scalar_type());
  });
  for_each_given(others, [&](const char* name, const at::Tensor& t) { floating(name, t); });
}

at::Tensor checked_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t T) {
  const at::Tensor cu = cu_seqlens.to(at::kLong).contiguous();
  const auto* offsets = cu.const_data_ptr<int64_t>();
  const int64_t last = cu.numel() - 1;
  TORCH_CHECK_VALUE(offsets[0] == 0, op, ": expected cu_seqlens to start with 0, got ", offsets[0]);
  for (int64_t n = 0; n < last; ++n)
    TORCH_CHECK_VALUE(offsets[n] <= offsets[n + 1], op,
                      ": expected cu_seqlens to be non-decreasing, got ", offsets[n], " before ",
                      offsets[n + 1], " at position ", n);
  TORCH_CHECK_VALUE(offsets[last] <= T, op, ": expected cu_seqlens to end at or before T = ", T,
                    ", got ", offsets[last]);
  return cu;
}

}  // namespace gla_ext
