// The results that forward of chunk_gla keeps for backward, besides its inputs.
#pragma once

#include "op.h"

namespace gla_ext {

// The bytes that forward of such a call must keep, by the device's plan. 0 if a size is symbolic,
// since a graph would hold the bytes as a number, or if the operator will refuse the call. Asked
// for under autograd, where a tensor knows its device even while tracing; in a kernel it does not.
int64_t for_backward_bytes(const ForwardArguments& a);

// For a call in halves: the bytes that the first half of each pass leaves, the number of forward's
// segments, and whether backward reads what forward's first half left. Zeros if nothing is shared.
struct HalfSizes {
  int64_t prepared = 0, segments = 0, prepared_bwd = 0;
  bool left = false;
};
HalfSizes half_sizes(const ForwardArguments& a, bool for_backward);

namespace cuda {

HalfSizes half_sizes(const ForwardArguments& a, bool for_backward);

// For CUDA tensors of four dimensions and known sizes, with heads and channels: the plan's number,
// or 0 in a build without CUDA kernels.
int64_t for_backward_bytes(const ForwardArguments& a);

}  // namespace cuda
}  // namespace gla_ext
