// An operator's CPU kernels, compiled once per capability, and the choice of those that run.
#pragma once

#include <string>
#include <vector>

namespace gla_ext::cpu {

// DEFAULT, AVX2 or AVX512. torch makes this choice, so ATEN_CPU_CAPABILITY applies to both.
std::string capability_in_use();
std::vector<std::string> capabilities_built();

// An operator's tables, one for each capability that its functions are compiled for. Its
// cpu_kernels.cpp is compiled for each of them and has
//   template <>
//   const SwigluKernels<float> KernelTables<SwigluKernels<float>>::CPU_CAPABILITY = {…};
template <class Table>
struct KernelTables {
  static const Table DEFAULT;
#if defined(__x86_64__)
  static const Table AVX2, AVX512;
#endif

  // The table for this processor.
  static const Table& in_use() {
#if defined(__x86_64__)
    static const std::string capability = capability_in_use();
    if (capability == "AVX512") return AVX512;
    if (capability == "AVX2") return AVX2;
#endif
    return DEFAULT;
  }
};

}  // namespace gla_ext::cpu
