// The halves of chunk_gla, composed of whole passes, for devices and calls without kernels that
// share work between halves. Also the fold: from tensors to the struct that a backend's loop takes.
#pragma once

#include "chunk_gla/op.h"
#include "dispatch/checker.h"
#include "fold.h"

namespace gla_ext {

// The arguments of chunk_gla_fold, described in ops.h.
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

void check_chunk_gla_fold(const FoldArguments& a);

namespace halves {

// The sum of a gate over the tokens, [B, H, D], of H heads.
at::Tensor sum_of_gates(const OptionalTensor& gate, const at::Tensor& q, const Shape& shape);

// The following functions do not use `prepared` and `entering`, which have the given sizes.
std::tuple<at::Tensor, at::Tensor> summary(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
    const OptionalTensor& gv, const OptionalTensor& initial_state, std::optional<double> scale,
    bool state_v_first, bool batch_invariant, bool for_backward, int64_t prepared_bytes);
ForwardOutputs apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const OptionalTensor& g, const OptionalTensor& gv,
                     const OptionalTensor& initial_state, std::optional<double> scale,
                     bool output_final_state, bool state_v_first, bool batch_invariant,
                     bool for_backward, const at::Tensor& prepared, int64_t segments);
std::tuple<at::Tensor, at::Tensor> summary_bwd(const at::Tensor& d_o, const OptionalTensor& dht,
                                               const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v, const OptionalTensor& g,
                                               const OptionalTensor& gv,
                                               std::optional<double> scale, bool state_v_first,
                                               bool batch_invariant, const at::Tensor& prepared,
                                               int64_t prepared_bytes);
BackwardOutputs apply_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
                          const OptionalTensor& gv, const OptionalTensor& initial_state,
                          std::optional<double> scale, bool state_v_first, bool batch_invariant,
                          const at::Tensor& prepared, const at::Tensor& entering,
                          const at::Tensor& prepared_bwd);

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

// chunk_gla_fold with positional arguments, as a backend registers it.
template <std::tuple<at::Tensor, at::Tensor> (*kernel)(const FoldArguments&)>
std::tuple<at::Tensor, at::Tensor> positional_fold(
    const at::Tensor& summaries, const OptionalTensor& decays, const OptionalTensor& boundary,
    int64_t size, c10::SymInt each, c10::SymInt rows, c10::SymInt H, c10::SymInt K, c10::SymInt V,
    bool key_gated, bool value_gated, bool state_v_first, at::IntArrayRef places,
    at::IntArrayRef reach, at::IntArrayRef entered) {
  return kernel({summaries, decays, boundary, size, each, rows, H, K, V, key_gated, value_gated,
                 state_v_first, places, reach, entered});
}

}  // namespace halves
}  // namespace gla_ext
