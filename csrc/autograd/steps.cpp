// The steps have no gradient of their own: they say so instead of losing it.
#include "checks/steps.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "checks/checker.h"
#include "halves.h"
#include "refuse.h"

namespace gla_ext {
namespace {

void refuse_grad(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = public_name(op.schema().name());
  const bool grad_mode = c10::GradMode::is_enabled();
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor()) continue;
    const at::Tensor& t = value.toTensor();
    refuse_unsupported(name.c_str(), t);
    TORCH_CHECK_NOT_IMPLEMENTED(!grad_mode || !t.defined() || !t.requires_grad(), name,
                                ": it has no gradient of its own, call gla_ext.chunk_gla, or "
                                "this under torch.no_grad()");
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  for (const char* half : kHalves)
    m.impl(half, torch::CppFunction::makeFromBoxedFunction<&refuse_grad>());
  for (const char* step : kSteps)
    m.impl(step, torch::CppFunction::makeFromBoxedFunction<&refuse_grad>());
}

}  // namespace gla_ext
