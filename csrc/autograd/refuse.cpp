#include "refuse.h"

#include <ATen/FuncTorchTLS.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "checks/checker.h"

namespace gla_ext {

namespace {

void refuse_unsupported(const char* op, const at::Tensor& t) {
  if (t.defined()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!t.is_nested() && !t.is_quantized(), op,
                                ": nested and quantized tensors are not supported, use cu_seqlens "
                                "for sequences of different lengths");
    TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(/*level=*/0).defined(), op,
                                ": forward-mode AD is not supported, use reverse mode (backward)");
  }
  // A C++ autograd Function would be silently wrong under them; torch's own message says less.
  if (const auto& functorch = at::functorch::functorchTLSAccessor()) {
    try {
      functorch->checkSupportsCppAutogradFunction();
    } catch (const c10::Error&) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, op,
                                  ": torch.func transforms (grad, vjp, jvp, jacrev, ...) are not "
                                  "supported, use torch.autograd");
    }
  }
}

}  // namespace

void refuse_unsupported(const char* op, std::initializer_list<Required> required,
                        std::initializer_list<OptionalTensor> optional) {
  for (const auto& [name, tensor] : required) {
    check_defined(op, name, tensor);
    refuse_unsupported(op, tensor);
  }
  for (const OptionalTensor& tensor : optional)
    if (given(tensor)) refuse_unsupported(op, *tensor);
}

void refuse_gradient(const char* op, const at::Tensor& t, const char* instead) {
  refuse_unsupported(op, t);
  TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t.requires_grad() || !c10::GradMode::is_enabled(),
                              op, ": ", instead);
}

void refuse_gradients(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                      const char* instead) {
  const std::string name = public_name(op.schema().name());
  const auto refuse = [&](const at::Tensor& t) { refuse_gradient(name.c_str(), t, instead); };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) refuse(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) refuse(t);
  }
}

}  // namespace gla_ext
