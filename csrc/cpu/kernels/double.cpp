// The table for fp64 accumulation (fp64 inputs); compiled once per CPU capability.
#include "table.h"

namespace gla_ext::cpu::CPU_CAPABILITY {
extern const Kernels<double> double_kernels;
const Kernels<double> double_kernels = make_kernels<double>();
}  // namespace gla_ext::cpu::CPU_CAPABILITY
