// The input contract of chunk_gla, once, for every backend and for tracing.
#pragma once

#include "arguments.h"

namespace gla_ext {

Shape check_chunk_gla_fwd(const ForwardArguments& a);
// The same under another operator's name.
Shape check_chunk_inputs(const char* op, const ForwardArguments& a);

// Of for_backward_bytes, what to allocate for `for_backward`.
int64_t check_for_backward_bytes(const char* op, int64_t for_backward_bytes);

Shape check_chunk_gla_bwd(const BackwardArguments& a);

// The default scale, K^-0.5, unless one is given.
double resolve_scale(std::optional<double> scale, int64_t K);

}  // namespace gla_ext
