// Autocast casts q, k and v, whose gates and states keep their dtype.
#include "dispatch/autocast.h"

#include "ops.h"

namespace gla_ext {
namespace {

// Of operators whose first arguments are q, k and v.
template <c10::DeviceType device>
void first_three_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Cast<device> cast;
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < 3; ++i) {
    c10::IValue& t = torch::jit::peek(*stack, i, arguments);
    t = cast(t.toTensor());
  }
  op.callBoxed(stack);
}

template <c10::DeviceType device>
void register_all(torch::Library& m) {
  m.impl("chunk_gla_fwd", CastFirst<device, 3, chunk_gla_fwd>::run);
  m.impl("chunk_gla_", CastFirst<device, 3, chunk_gla_>::run);
  m.impl("chunk_gla_.out", CastFirst<device, 3, chunk_gla_out>::run);
  for (const char* op : {"chunk_gla_summary", "chunk_gla_apply", "chunk_gla_across_ranks"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&first_three_autocast<device>>());
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
