// What forward of chunk_gla keeps for backward beside its inputs.
#pragma once

#include "op.h"

namespace gla_ext {

// Bytes that forward of such a call is to keep: what the device's plan says, but 0 where a size is
// symbolic, since a graph would hold it as a number, and where the operator will refuse the call.
// Asked under autograd, where a tensor knows its device while tracing too; the kernels' side does
// not.
int64_t for_backward_bytes(const ForwardArguments& a);

// Of a call in halves: how large what the first half of each pass leaves is, how many segments
// forward has, and whether backward reads what forward's has left. Zeros where nothing is shared.
struct HalfSizes {
  int64_t prepared = 0, segments = 0, prepared_bwd = 0;
  bool left = false;
};
HalfSizes half_sizes(const ForwardArguments& a, bool for_backward);

namespace cuda {

HalfSizes half_sizes(const ForwardArguments& a, bool for_backward);

// Of CUDA tensors of four dimensions and known sizes, none of heads or channels 0: the plan's
// answer, or 0 in a build without CUDA kernels.
int64_t for_backward_bytes(const ForwardArguments& a);

}  // namespace cuda
}  // namespace gla_ext
