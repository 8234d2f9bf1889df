// The halves of chunk_gla on the CPU: each a pass of its own.
#include "halves.h"

#include <torch/library.h>

namespace gla_ext {

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("chunk_gla_summary", &halves::summary);
  m.impl("chunk_gla_apply", &halves::apply);
  m.impl("chunk_gla_summary_bwd", &halves::summary_bwd);
  m.impl("chunk_gla_apply_bwd", &halves::apply_bwd);
}

}  // namespace gla_ext
