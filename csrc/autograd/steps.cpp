// The steps have no gradient of their own: they say so instead of losing it.
#include "checks/steps.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "halves.h"
#include "dispatch/refuse.h"

namespace gla_ext {
namespace {

void refuse_grad(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_gradients(op, *stack,
                   "it has no gradient of its own, call gla_ext.chunk_gla, or this under "
                   "torch.no_grad()");
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
