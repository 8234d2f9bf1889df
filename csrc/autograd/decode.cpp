// A decoded token's operators have no gradient: they say so instead of losing it. What steps on a
// pool tells autograd, one key below, that it has written to it.
#include "checks/decode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "dispatch/refuse.h"

namespace gla_ext {
namespace {

constexpr const char* kInstead = "decoding has no gradient, run it under torch.no_grad()";

void without_grad(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_gradients(op, *stack, kInstead);
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

void step_without_grad(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_gradients(op, *stack, kInstead);
  at::AutoDispatchBelowAutograd below;
  op.callBoxed(stack);
}

void step_and_tell(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  const auto place = static_cast<size_t>(*op.schema().argumentIndexWithName("state"));
  const at::Tensor state = torch::jit::peek(*stack, place, arguments).toTensor();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  tell_autograd(state);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  for (const char* op : kDecodeOperators) {
    const bool steps = std::string_view(op) == "recurrent_gla_low_rank_step_";
    m.impl(op, steps ? torch::CppFunction::makeFromBoxedFunction<&step_without_grad>()
                     : torch::CppFunction::makeFromBoxedFunction<&without_grad>());
  }
}

TORCH_LIBRARY_IMPL(gla_ext, ADInplaceOrView, m) {
  m.impl("recurrent_gla_low_rank_step_",
         torch::CppFunction::makeFromBoxedFunction<&step_and_tell>());
}

}  // namespace gla_ext
