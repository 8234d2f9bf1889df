#include "kernel_tables.h"

#include <ATen/Version.h>

namespace gla_ext::cpu {

std::string capability_in_use() {
#if defined(__x86_64__)
  // torch also has names for variants of AVX512.
  static const std::string chosen = [] {
    const std::string torch = at::get_cpu_capability();
    if (torch.rfind("AVX512", 0) == 0) return "AVX512";
    if (torch.rfind("AVX2", 0) == 0) return "AVX2";
    return "DEFAULT";
  }();
  return chosen;
#else
  return "DEFAULT";
#endif
}

std::vector<std::string> capabilities_built() {
#if defined(__x86_64__)
  return {"DEFAULT", "AVX2", "AVX512"};
#else
  return {"DEFAULT"};
#endif
}

}  // namespace gla_ext::cpu
