// The halves of chunk_gla, composed of whole passes, for devices and calls without kernels that
// share work between halves. Also the fold: from tensors to the struct that a backend's loop takes.
#pragma once

#include <torch/library.h>

#include "chunk_gla/op.h"
#include "dispatch/checker.h"
#include "fold.h"

namespace gla_ext {

// The arguments, described in ops.h.
struct SummaryArguments : ChunkInputs {
  const OptionalTensor& initial_state;
  std::optional<double> scale;
  bool state_v_first, batch_invariant, for_backward;
  int64_t prepared_bytes;
};

struct ApplyArguments : ChunkInputs {
  const OptionalTensor& initial_state;
  std::optional<double> scale;
  bool output_final_state, state_v_first, batch_invariant, for_backward;
  const at::Tensor& prepared;
  int64_t segments;
};

struct SummaryBackwardArguments : ChunkOutputGrads, ChunkInputs {
  std::optional<double> scale;
  bool state_v_first, batch_invariant;
  const at::Tensor& prepared;
  int64_t prepared_bytes;
};

struct ApplyBackwardArguments : ChunkOutputGrads, ChunkInputs {
  const OptionalTensor& initial_state;
  std::optional<double> scale;
  bool state_v_first, batch_invariant;
  const at::Tensor &prepared, &entering, &prepared_bwd;
};

struct FoldArguments {
  const at::Tensor& summaries;
  const OptionalTensor &decays, &boundary;
  int64_t size;
  c10::SymInt each, rows, H, K, V;
  bool key_gated, value_gated, state_v_first;
  at::IntArrayRef places, reach, entered;  // one element each; entered: none unless packed

  bool backwards() const { return given(decays); }
  c10::SymInt decays_each() const;
  Sizes x_sizes() const;
};

// The call of chunk_gla or its backward that a half is a part of: its arguments are checked as that
// call's. Where halves share no work, a half runs it.
ForwardArguments whole(const SummaryArguments& a);
ForwardArguments whole(const ApplyArguments& a);
BackwardArguments whole(const SummaryBackwardArguments& a, const OptionalTensor& initial_state);
BackwardArguments whole(const ApplyBackwardArguments& a);

void check_chunk_gla_fold(const FoldArguments& a);

// chunk_gla_fold as the dispatcher calls it, with sizes by value.
using FoldOperator = TwoTensors(const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                                int64_t, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt,
                                c10::SymInt, bool, bool, bool, at::IntArrayRef, at::IntArrayRef,
                                at::IntArrayRef);

// Registers the operators from a backend's kernels.
template <auto summary, auto apply, auto summary_bwd, auto apply_bwd, auto fold>
void register_halves(torch::Library& m) {
  m.impl("chunk_gla_summary", by_arguments<chunk_gla_summary, summary>);
  m.impl("chunk_gla_apply", by_arguments<chunk_gla_apply, apply>);
  m.impl("chunk_gla_summary_bwd", by_arguments<chunk_gla_summary_bwd, summary_bwd>);
  m.impl("chunk_gla_apply_bwd", by_arguments<chunk_gla_apply_bwd, apply_bwd>);
  m.impl("chunk_gla_fold", by_arguments<static_cast<FoldOperator*>(nullptr), fold>);
}

namespace halves {

// The following functions do not use `prepared` and `entering`, which have the given sizes.
TwoTensors summary(const SummaryArguments& a);
ForwardOutputs apply(const ApplyArguments& a);
TwoTensors summary_bwd(const SummaryBackwardArguments& a);
BackwardOutputs apply_bwd(const ApplyBackwardArguments& a);

// A fold's tensors: inputs contiguous, outputs allocated.
struct FoldTensors {
  explicit FoldTensors(const FoldArguments& arguments);

  template <class T>
  Fold<T> problem() const {
    Fold<T> p;
    p.size = a.size;
    p.each = a.each.expect_int();
    p.rows = a.rows.expect_int();
    p.H = a.H.expect_int(), p.K = a.K.expect_int(), p.V = a.V.expect_int();
    p.rank = a.places[0];
    p.reach = a.reach[0];
    p.is_packed = !a.entered.empty();
    if (p.is_packed) p.entered = a.entered[0];
    p.key_gated = a.key_gated, p.value_gated = a.value_gated;
    p.v_first = a.state_v_first, p.backwards = a.backwards();
    p.states = summaries.const_data_ptr<T>();
    p.stride = summaries.numel() / p.size;
    const bool in_summaries = !a.backwards();
    p.decays = in_summaries ? p.states + p.each * p.H * p.K * p.V : decays.const_data_ptr<T>();
    p.decay_stride = in_summaries ? p.stride : p.decays_each();
    if (boundary.defined()) p.boundary = boundary.const_data_ptr<T>();
    p.x = x.mutable_data_ptr<T>();
    if (in_summaries) p.kept = kept.mutable_data_ptr<T>();
    return p;
  }

  const FoldArguments& a;
  at::Tensor summaries, decays, boundary;
  at::Tensor x, kept;
};

}  // namespace halves
}  // namespace gla_ext
