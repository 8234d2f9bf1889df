#include "schema.h"

#include <c10/util/Exception.h>

#include <map>

// The operators are defined in their folders. This block lets torch refuse a second gla_ext in one
// process.
TORCH_LIBRARY(gla_ext, m) {}

namespace gla_ext {
namespace {

// User names that do not follow from the operators' names. Filled while the library is loaded.
std::map<std::string, std::string>& user_names() {
  static std::map<std::string, std::string> names;
  return names;
}

void refuse_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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
  const char* help = device->is_cuda() ? "; FORCE_CUDA=1 make builds them" : "";
  TORCH_CHECK_NOT_IMPLEMENTED(false, name, ": no kernels for device ", *device,
                              " in this build of gla_ext", help, "; see python -m gla_ext.info");
}

void refuse_batches(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, public_name(op.schema().name()),
                              ": torch.vmap is not supported, use more rows and slots");
}

template <auto kernel>
void impl_boxed(torch::Library& m, const char* name, c10::DispatchKey key) {
  m.impl(name, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<kernel>()));
}

}  // namespace

std::string define_schema(torch::Library& m, const std::string& schema) {
  m.set_python_module("gla_ext.ops");
  // Inductor pads the rows of tensors that it allocates. It also copies tensors whose strides
  // differ from those of eager mode, unless an operator's tag says that their order is enough.
  // These operators can read rows at any distance.
  m.def(schema.c_str(), {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  return schema.substr(0, schema.find('('));
}

void define(torch::Library& m, const std::string& schema, const char* user_name) {
  const std::string name = define_schema(m, schema);
  if (user_name != nullptr) user_names()[name] = user_name;
  impl_boxed<&refuse_device>(m, name.c_str(), c10::DispatchKey::CompositeExplicitAutograd);
}

void define_with_out(torch::Library& m, const std::string& name, const std::string& arguments,
                     char alias) {
  define(m, name + "(" + arguments + ") -> Tensor");
  define(m, name + ".out(" + arguments + ", *, Tensor(" + alias + "!) out) -> ()");
}

void refuse_vmap(torch::Library& m, std::initializer_list<const char*> operators) {
  for (const char* name : operators)
    impl_boxed<&refuse_batches>(m, name, c10::DispatchKey::FuncTorchBatched);
}

std::string public_name(const std::string& schema_name) {
  const std::string name = schema_name.substr(schema_name.find("::") + 2), suffix = "_fwd";
  if (const auto found = user_names().find(name); found != user_names().end()) return found->second;
  const bool is_forward = name.size() > suffix.size() &&
                          name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
  return is_forward ? name.substr(0, name.size() - suffix.size()) : name;
}

}  // namespace gla_ext
