// chunk_gla's arguments by name (dispatch/arguments.h), and their checks.
#pragma once

#include "common/shape.h"
#include "dispatch/arguments.h"
#include "ops.h"

namespace gla_ext {

// Described in ops.h.
struct ForwardArguments {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &g, &gv, &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool output_final_state, state_v_first, batch_invariant;
  int64_t for_backward_bytes;
};

struct BackwardArguments {
  const at::Tensor& d_o;
  const OptionalTensor& dht;
  const at::Tensor &q, &k, &v;
  const OptionalTensor &g, &gv, &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool state_v_first, batch_invariant;
  const OptionalTensor& for_backward;
  bool gate_gradient;
};

// The operator, through the dispatcher.
ForwardOutputs dispatch(const ForwardArguments& a);

// The checks, for every backend and for tracing.
Shape check_chunk_gla_fwd(const ForwardArguments& a);
// The same checks under another operator's name.
Shape check_chunk_inputs(const char* op, const ForwardArguments& a);

// Checks for_backward_bytes. Returns what to allocate for `for_backward`.
int64_t check_for_backward_bytes(const char* op, int64_t for_backward_bytes);

Shape check_chunk_gla_bwd(const BackwardArguments& a);

}  // namespace gla_ext
