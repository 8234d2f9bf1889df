#include "refuse.h"

#include <ATen/FuncTorchTLS.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "checker.h"
#include "schema.h"

namespace gla_ext {

namespace {

void refuse_tensor(const char* op, const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(!t.is_nested() && !t.is_quantized(), op,
                              ": nested and quantized tensors are not supported, use cu_seqlens "
                              "for sequences of different lengths");
  TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(/*level=*/0).defined(), op,
                              ": forward-mode AD is not supported, use reverse mode (backward)");
}

}  // namespace

void refuse_argument(const char* schema, size_t place, const at::Tensor& t, bool required) {
  const bool plain =
      t.defined() ? !t.is_nested() && !t.is_quantized() && !t._fw_grad(0).defined() : !required;
  if (plain) return;
  const std::string name = c10::str("gla_ext::", schema), op = public_name(name);
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  check_defined(op.c_str(), handle.schema().arguments().at(place).name().c_str(), t);
  refuse_tensor(op.c_str(), t);
}

void refuse_transforms(const char* schema) {
  const auto& functorch = at::functorch::functorchTLSAccessor();
  if (!functorch) return;
  // In a transform a C++ autograd Function would be silently wrong. torch's own message is less
  // clear.
  try {
    functorch->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, public_name(c10::str("gla_ext::", schema)),
                                ": torch.func transforms (grad, vjp, jvp, jacrev, ...) are not "
                                "supported, use torch.autograd");
  }
}

void refuse_double_backward(const char* fwd) {
  C10_THROW_ERROR(NotImplementedError,
                  public_name(c10::str("gla_ext::", fwd)) + ": double backward is not supported");
}

void refuse_gradient(const char* op, const at::Tensor& t, const char* instead) {
  if (t.defined()) refuse_tensor(op, t);
  TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t.requires_grad() || !c10::GradMode::is_enabled(),
                              op, ": ", instead);
}

void refuse_gradients(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                      const char* instead) {
  const std::string name = public_name(op.schema().name());
  const auto refuse = [&](const at::Tensor& t) { refuse_gradient(name.c_str(), t, instead); };
  refuse_transforms(name.c_str());
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) refuse(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) refuse(t);
  }
}

}  // namespace gla_ext
