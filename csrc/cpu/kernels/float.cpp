// The table for fp32 accumulation (bf16, fp16 and fp32 inputs); compiled once per CPU capability.
#include "steps/tasks.h"

namespace gla_ext::cpu {
template <>
const Kernels<float> KernelTables<Kernels<float>>::CPU_CAPABILITY =
    CPU_CAPABILITY::make_kernels<float>();
}  // namespace gla_ext::cpu
