// The steps and the operators on a pool of states have no gradient: they say so instead of losing
// it. Whoever writes into a tensor tells autograd, which may have saved it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "../recurrent_checks.h"
#include "refuse.h"

namespace gla_ext {
namespace {

const char* const kStepAdvice =
    ": a step has no gradient of its own, call gla_ext.chunk_gla, or the step under "
    "torch.no_grad()";
const char* const kPoolAdvice =
    ": decoding on a pool has no gradient, call gla_ext.fused_recurrent_gla, or run it under "
    "torch.no_grad()";

void refuse_grad(const c10::OperatorHandle& op, torch::jit::Stack* stack, const char* advice) {
  const std::string name = public_name(op.schema().name());
  const bool grad_mode = c10::GradMode::is_enabled();
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!values[i].isTensor()) continue;
    const at::Tensor& t = values[i].toTensor();
    refuse_unsupported(name, t);
    TORCH_CHECK_NOT_IMPLEMENTED(!grad_mode || !t.defined() || !t.requires_grad(), name, advice);
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() && t.defined()) written.push_back(t);
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (const at::Tensor& t : written) t.unsafeGetTensorImpl()->bump_version();
}

void refuse_grad_of_step(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_grad(op, stack, kStepAdvice);
}
void refuse_grad_on_pool(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_grad(op, stack, kPoolAdvice);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  for (const char* step : kSteps)
    m.impl(step, torch::CppFunction::makeFromBoxedFunction<&refuse_grad_of_step>());
  for (const char* op : kPoolOperators)
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_grad_on_pool>());
}

}  // namespace gla_ext
