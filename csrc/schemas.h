// The schemas that the TORCH_LIBRARY block of ops.cpp takes from other files.
#pragma once

#include <torch/library.h>

#include <vector>

namespace gla_ext {

void define_pool_operators(torch::Library& m, const std::vector<at::Tag>& tags);

}  // namespace gla_ext
