// Indices in device memory, as the host passes them to kernels.
#pragma once

namespace gla_ext::cuda {

// int32 or int64; null if absent.
struct Indices {
  const void* data = nullptr;
  bool are_int64 = false;
};

}  // namespace gla_ext::cuda
