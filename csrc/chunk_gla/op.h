// chunk_gla's arguments by name (dispatch/arguments.h), and their checks.
#pragma once

#include "common/shape.h"
#include "dispatch/arguments.h"
#include "ops.h"

namespace gla_ext {

// The arguments, described in ops.h. Those that several operators take are a base class, in the
// order of the schema.
struct ChunkInputs {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &g, &gv;
};
struct ChunkOutputGrads {
  const at::Tensor& d_o;
  const OptionalTensor& dht;
};

struct ForwardArguments : ChunkInputs {
  const OptionalTensor &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool output_final_state, state_v_first, batch_invariant;
  int64_t for_backward_bytes;
};

struct BackwardArguments : ChunkOutputGrads, ChunkInputs {
  const OptionalTensor &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool state_v_first, batch_invariant;
  const OptionalTensor& for_backward;
  bool gate_gradient;
};

// The operators, through the dispatcher.
ForwardOutputs dispatch(const ForwardArguments& a);
BackwardOutputs dispatch(const BackwardArguments& a);

// The checks, for every backend and for tracing.
// op: the name in errors.
Shape check_chunk_gla_fwd(const ForwardArguments& a, const char* op = "chunk_gla");

// Checks for_backward_bytes. Returns what to allocate for `for_backward`.
int64_t check_for_backward_bytes(const char* op, int64_t for_backward_bytes);

Shape check_chunk_gla_bwd(const BackwardArguments& a);

}  // namespace gla_ext
