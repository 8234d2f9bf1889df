#include "checker.h"

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

std::string public_name(const std::string& schema_name) {
  const std::string name = schema_name.substr(schema_name.find("::") + 2);
  if (name == "recurrent_gla_fwd") return "fused_recurrent_gla";
  if (name == "rms_norm_gate_fwd") return "rms_norm_gate";
  if (name == "rms_norm_residual_fwd") return "rms_norm_residual";
  if (name == "cross_entropy_fwd") return "cross_entropy";
  if (name == "linear_cross_entropy_fwd") return "linear_cross_entropy";
  if (name == "gate_projection_fwd") return "gate_projection";
  if (name == "swiglu_fwd") return "swiglu";
  if (name == "short_convolution_fwd") return "ShortConvolution";
  return name == "chunk_gla_fwd" ? "chunk_gla" : name;
}

void check_defined(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), op, ": expected ", name, " to be a tensor, got None");
}

}  // namespace gla_ext
