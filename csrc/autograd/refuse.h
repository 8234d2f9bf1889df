// What no Autograd kernel of gla_ext supports, refused in a sentence.
#pragma once

#include "../checks.h"

namespace gla_ext {

// Raises for a forward-mode tangent, a torch.func transform in progress, and tensors that are
// quantized or nested.
void refuse_unsupported(const char* op, const OptionalTensor& t);

}  // namespace gla_ext
