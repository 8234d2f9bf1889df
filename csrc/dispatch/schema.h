// Registers operators in torch's table of operators.
#pragma once

#include <torch/library.h>

#include <initializer_list>
#include <string>

namespace gla_ext {

// Defines the operator of a schema, such as "swiglu_fwd(Tensor gate, Tensor up) -> Tensor". On
// devices and layouts without kernels it raises an error of one sentence.
// user_name: its name in messages. Default: its name without "_fwd".
void define(torch::Library& m, const std::string& schema, const char* user_name = nullptr);

// Defines both forms of an operator that returns one tensor: `name` returns it, `name.out` takes it
// as `out`, of the alias set `alias`.
void define_with_out(torch::Library& m, const std::string& name, const std::string& arguments,
                     char alias);

// Refuses torch.vmap over operators that write to a pool.
void refuse_vmap(torch::Library& m, std::initializer_list<const char*> operators);

// The name a user knows an operator by, for messages: "swiglu" for "gla_ext::swiglu_fwd".
std::string public_name(const std::string& schema_name);

// m.def with the tags of all operators. Returns the name.
std::string define_schema(torch::Library& m, const std::string& schema);

// Defines an operator that is composed of others and, below autograd, is the same on every device.
template <typename Kernel>
void define_composite(torch::Library& m, const std::string& schema, Kernel* kernel) {
  const std::string name = define_schema(m, schema);
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel));
}

}  // namespace gla_ext
