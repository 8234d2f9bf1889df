// The table for fp32 accumulation (bf16, fp16 and fp32 inputs); compiled once per CPU capability.
#include "table.h"

namespace gla_ext::cpu::CPU_CAPABILITY {
extern const Kernels<float> float_kernels;
const Kernels<float> float_kernels = make_kernels<float>();
}  // namespace gla_ext::cpu::CPU_CAPABILITY
