// What forward of chunk_gla keeps for backward beside its inputs and the states.
#pragma once

#include "../checks.h"

namespace gla_ext {

struct KeptInputs {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &g, &gv, &cu_seqlens;
  bool save_states, batch_invariant;
};

// Bytes that forward of such a call is to keep: what the device's plan says, but 0 where a size is
// symbolic, since a graph would hold it as a number, and where the operator will refuse the call.
// Asked under autograd, where a tensor knows its device while tracing too; the kernels' side does
// not.
int64_t bytes_to_keep(const KeptInputs& in);

// Of CUDA tensors of four dimensions and known sizes, none of heads or channels 0; set where CUDA
// kernels are built.
extern int64_t (*cuda_bytes_to_keep)(const KeptInputs& in);

}  // namespace gla_ext
