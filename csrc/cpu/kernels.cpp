#include "kernels.h"

#include <ATen/Version.h>

namespace gla_ext::cpu {

std::string capability_in_use() {
#if defined(__x86_64__)
  // torch's own choice, so that ATEN_CPU_CAPABILITY means the same to both; it also names AVX512
  // variants.
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

#if defined(__x86_64__)
#define GLA_CHOOSE(table)                          \
  (capability_in_use() == "AVX512" ? AVX512::table \
   : capability_in_use() == "AVX2" ? AVX2::table   \
                                   : DEFAULT::table)
#else
#define GLA_CHOOSE(table) DEFAULT::table
#endif

template <>
const Kernels<float>& kernels<float>() {
  static const Kernels<float>& table = GLA_CHOOSE(float_kernels);
  return table;
}

template <>
const Kernels<double>& kernels<double>() {
  static const Kernels<double>& table = GLA_CHOOSE(double_kernels);
  return table;
}

}  // namespace gla_ext::cpu
