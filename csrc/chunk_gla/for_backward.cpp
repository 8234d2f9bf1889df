#include "for_backward.h"

#include <algorithm>

#include "common/heads.h"

namespace gla_ext {
namespace {

bool has_known_sizes(const at::Tensor& t) {
  const c10::SymIntArrayRef sizes = t.sym_sizes();
  return std::none_of(sizes.begin(), sizes.end(),
                      [](const c10::SymInt& size) { return size.is_symbolic(); });
}

bool is_planned_for(const at::Tensor& t) {
  return t.defined() && t.is_cuda() && t.dim() == 4 && has_known_sizes(t) && t.size(2) > 0 &&
         t.size(3) > 0;
}

bool is_planned_for(const ForwardArguments& a) {
  for (const at::Tensor* t : {&a.q, &a.k, &a.v})
    if (!is_planned_for(*t)) return false;
  if (given(a.g) && !is_planned_for(over_channels(*a.g, 1))) return false;
  if (given(a.gv) && !is_planned_for(*a.gv)) return false;
  return !given(a.cu_seqlens) || has_known_sizes(*a.cu_seqlens);
}

}  // namespace

int64_t for_backward_bytes(const ForwardArguments& a) {
  return is_planned_for(a) ? cuda::for_backward_bytes(a) : 0;
}

HalfSizes half_sizes(const ForwardArguments& a, bool for_backward) {
  return is_planned_for(a) ? cuda::half_sizes(a, for_backward) : HalfSizes{};
}

#if !defined(GLA_EXT_CUDA)
int64_t cuda::for_backward_bytes(const ForwardArguments&) { return 0; }
HalfSizes cuda::half_sizes(const ForwardArguments&, bool) { return {}; }
#endif

}  // namespace gla_ext
