// The table for fp64 accumulation (fp64 inputs); compiled once per CPU capability.
#include "steps/tasks.h"

namespace gla_ext::cpu {
template <>
const Kernels<double> KernelTables<Kernels<double>>::CPU_CAPABILITY =
    CPU_CAPABILITY::make_kernels<double>();
}  // namespace gla_ext::cpu
