#include "kept.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace gla_ext {
namespace {

bool wanted() {
  const char* value = std::getenv("GLA_EXT_KEEP_OPERANDS");
  const std::string_view keep = value == nullptr ? "" : value;
  TORCH_CHECK_VALUE(keep.empty() || keep == "0" || keep == "1",
                    "GLA_EXT_KEEP_OPERANDS: expected 0 or 1, got ", keep);
  return keep != "0";
}

bool has_known_sizes(const at::Tensor& t) {
  const c10::SymIntArrayRef sizes = t.sym_sizes();
  return std::none_of(sizes.begin(), sizes.end(),
                      [](const c10::SymInt& size) { return size.is_symbolic(); });
}

}  // namespace

int64_t (*cuda_bytes_to_keep)(const KeptInputs& in) = nullptr;

int64_t bytes_to_keep(const KeptInputs& in) {
  for (const at::Tensor* t : {&in.q, &in.k, &in.v})
    if (!t->defined() || !t->is_cuda() || t->dim() != 4 || !has_known_sizes(*t)) return 0;
  for (const OptionalTensor* t : {&in.g, &in.gv, &in.cu_seqlens})
    if (given(*t) && (!(*t)->is_cuda() || !has_known_sizes(**t))) return 0;
  if (cuda_bytes_to_keep == nullptr || !wanted()) return 0;
  return cuda_bytes_to_keep(in);
}

}  // namespace gla_ext
