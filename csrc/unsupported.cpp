// What this build has no kernels for. Devices and layouts without them get one sentence, the same
// for every operator; so does vmap over what writes to a pool.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "autograd/for_backward.h"
#include "dispatch/checker.h"
#include "dispatch/schema.h"
#include "checks/decode.h"
#include "checks/recurrent_gla.h"
#include "checks/steps.h"
#include "halves.h"

namespace gla_ext {
namespace {

void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = public_name(op.schema().name());
  std::optional<at::Device> device;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& t = value.toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, name,
                                ": expected strided (dense) tensors, got layout ", t.layout());
    if (!device.has_value()) device = t.device();
  }
  TORCH_CHECK_TYPE(device.has_value(), name, ": expected tensors, got None");
  TORCH_CHECK_NOT_IMPLEMENTED(false, name, ": no kernels for device ", *device,
                              " in this build of gla_ext; see python -m gla_ext.info");
}

void refuse_vmap(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, public_name(op.schema().name()),
                              ": torch.vmap is not supported, use more rows and slots");
}

}  // namespace

#if !defined(GLA_EXT_CUDA)
int64_t cuda::for_backward_bytes(const ForwardArguments&) { return 0; }
HalfSizes cuda::half_sizes(const ForwardArguments&, bool) { return {}; }
#endif

TORCH_LIBRARY_IMPL(gla_ext, CompositeExplicitAutograd, m) {
  for (const char* op : {"chunk_gla_fwd",
                         "chunk_gla_bwd",
                         "chunk_gla_",
                         "chunk_gla_.out",
                         "recurrent_gla_fwd",
                         "recurrent_gla_bwd",
                         "cross_entropy_fwd",
                         "cross_entropy_bwd",
                         "cross_entropy_bwd_",
                         "cross_entropy_with_grad_",
                         "linear_cross_entropy_fwd"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  for (const char* op : kHalves) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  for (const char* op : kPoolOperators)
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  for (const char* op : kDecodeOperators)
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  for (const char* op : kSteps) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(gla_ext, FuncTorchBatched, m) {
  for (const char* op : {"chunk_gla_", "chunk_gla_.out", "recurrent_gla_step_",
                         "recurrent_gla_step_.out", "recurrent_gla_verify.out",
                         "recurrent_gla_commit_"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
  for (const char* op : kDecodeOperators)
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
}

}  // namespace gla_ext
