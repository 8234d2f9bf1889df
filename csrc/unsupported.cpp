// What this build has no kernels for. Devices and layouts without them get one sentence, the same
// for every operator; so does vmap over what writes to a pool.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "checks/recurrent_gla.h"
#include "dispatch/checker.h"
#include "dispatch/schema.h"

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

TORCH_LIBRARY_IMPL(gla_ext, CompositeExplicitAutograd, m) {
  for (const char* op : {"recurrent_gla_fwd", "recurrent_gla_bwd"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  for (const char* op : kPoolOperators)
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(gla_ext, FuncTorchBatched, m) {
  for (const char* op : {"recurrent_gla_step_", "recurrent_gla_step_.out",
                         "recurrent_gla_verify.out", "recurrent_gla_commit_"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
}

}  // namespace gla_ext
