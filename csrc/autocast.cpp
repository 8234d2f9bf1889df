// Autocast casts q, k and v, whose gates and states keep their dtype.
#include "dispatch/autocast.h"

#include "ops.h"

namespace gla_ext {
namespace {

template <c10::DeviceType device>
void register_all(torch::Library& m) {
  m.impl("recurrent_gla_fwd", CastFirst<device, 3, recurrent_gla_fwd>::run);
  m.impl("recurrent_gla_step_", CastFirst<device, 3, recurrent_gla_step_>::run);
  m.impl("recurrent_gla_step_.out", CastFirst<device, 3, recurrent_gla_step_out>::run);
  m.impl("recurrent_gla_verify", CastFirst<device, 3, recurrent_gla_verify>::run);
  m.impl("recurrent_gla_verify.out", CastFirst<device, 3, recurrent_gla_verify_out>::run);
  m.impl("recurrent_gla_commit_", CastFirst<device, 2, recurrent_gla_commit_>::run);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, AutocastCPU, m) { register_all<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(gla_ext, AutocastCUDA, m) { register_all<c10::DeviceType::CUDA>(m); }

}  // namespace gla_ext
