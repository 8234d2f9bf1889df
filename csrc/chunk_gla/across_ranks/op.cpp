// The halves of chunk_gla over several ranks, and the fold between them. autograd.cpp makes one
// operator of them, chunk_gla_across_ranks.
#include "op.h"

#include "dispatch/autocast.h"
#include "dispatch/in_place.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"

namespace gla_ext {

TwoTensors chunk_gla_summary(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const OptionalTensor& g, const OptionalTensor& gv,
                             const OptionalTensor& initial_state, std::optional<double> scale,
                             bool state_v_first, bool batch_invariant, bool for_backward,
                             int64_t prepared_bytes) {
  static const Op<decltype(chunk_gla_summary)> op("gla_ext::chunk_gla_summary");
  return op(q, k, v, g, gv, initial_state, scale, state_v_first, batch_invariant, for_backward,
            prepared_bytes);
}

ForwardOutputs chunk_gla_apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& g, const OptionalTensor& gv,
                               const OptionalTensor& initial_state, std::optional<double> scale,
                               bool output_final_state, bool state_v_first, bool batch_invariant,
                               bool for_backward, const at::Tensor& prepared, int64_t segments) {
  static const Op<decltype(chunk_gla_apply)> op("gla_ext::chunk_gla_apply");
  return op(q, k, v, g, gv, initial_state, scale, output_final_state, state_v_first,
            batch_invariant, for_backward, prepared, segments);
}

TwoTensors chunk_gla_summary_bwd(const at::Tensor& d_o, const OptionalTensor& dht,
                                 const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const OptionalTensor& g, const OptionalTensor& gv,
                                 std::optional<double> scale, bool state_v_first,
                                 bool batch_invariant, const at::Tensor& prepared,
                                 int64_t prepared_bytes) {
  static const Op<decltype(chunk_gla_summary_bwd)> op("gla_ext::chunk_gla_summary_bwd");
  return op(d_o, dht, q, k, v, g, gv, scale, state_v_first, batch_invariant, prepared,
            prepared_bytes);
}

BackwardOutputs chunk_gla_apply_bwd(const at::Tensor& d_o, const OptionalTensor& dht,
                                    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const OptionalTensor& g, const OptionalTensor& gv,
                                    const OptionalTensor& initial_state,
                                    std::optional<double> scale, bool state_v_first,
                                    bool batch_invariant, const at::Tensor& prepared,
                                    const at::Tensor& entering, const at::Tensor& prepared_bwd) {
  static const Op<decltype(chunk_gla_apply_bwd)> op("gla_ext::chunk_gla_apply_bwd");
  return op(d_o, dht, q, k, v, g, gv, initial_state, scale, state_v_first, batch_invariant,
            prepared, entering, prepared_bwd);
}

TwoTensors chunk_gla_fold(const at::Tensor& summaries, const OptionalTensor& decays,
                          const OptionalTensor& boundary, int64_t size, const c10::SymInt& each,
                          const c10::SymInt& rows, const c10::SymInt& H, const c10::SymInt& K,
                          const c10::SymInt& V, bool key_gated, bool value_gated,
                          bool state_v_first, at::IntArrayRef places, at::IntArrayRef reach,
                          at::IntArrayRef entered) {
  static const Op<FoldOperator> op("gla_ext::chunk_gla_fold");
  return op(summaries, decays, boundary, size, each, rows, H, K, V, key_gated, value_gated,
            state_v_first, places, reach, entered);
}

// The whole calls, of whose arguments the halves take a part.
ForwardArguments whole(const SummaryArguments& a) {
  return {a, a.initial_state, kAbsent, a.scale, true, a.state_v_first, a.batch_invariant, 0};
}

ForwardArguments whole(const ApplyArguments& a) {
  return {a,
          a.initial_state,
          kAbsent,
          a.scale,
          a.output_final_state,
          a.state_v_first,
          a.batch_invariant,
          0};
}

BackwardArguments whole(const SummaryBackwardArguments& a, const OptionalTensor& initial_state) {
  return {a, a, initial_state, kAbsent, a.scale, a.state_v_first, a.batch_invariant, kAbsent, true};
}

BackwardArguments whole(const ApplyBackwardArguments& a) {
  return {a,       a,   a.initial_state, kAbsent, a.scale, a.state_v_first, a.batch_invariant,
          kAbsent, true};
}

c10::SymInt FoldArguments::decays_each() const {
  return each * H * (c10::SymInt(0) + (key_gated ? K : 0) + (value_gated ? V : 0));
}

Sizes FoldArguments::x_sizes() const {
  return state_v_first ? Sizes{rows, H, V, K} : Sizes{rows, H, K, V};
}

void check_chunk_gla_fold(const FoldArguments& a) {
  const char* op = "chunk_gla_fold";
  const Checker check(op, "summaries", a.summaries);
  check.strided("summaries", a.summaries);
  const auto dtype = a.summaries.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, op,
                   ": expected summaries to be torch.float32 or torch.float64, got ",
                   dtype_name(dtype));
  const auto check_one = [&](const char* name, at::IntArrayRef values) {
    TORCH_CHECK_VALUE(values.size() == 1, op, ": expected ", name, " to have 1 element, got ",
                      values.size());
  };
  check_one("places", a.places);
  check_one("reach", a.reach);
  if (!a.entered.empty()) check_one("entered", a.entered);
  TORCH_CHECK_VALUE(a.size >= 1, op, ": expected size to be at least 1, got ", a.size);
  const int64_t last = a.size - 1, place = a.places[0];
  const int64_t room = a.backwards() ? last - place : place;
  TORCH_CHECK_VALUE(place >= 0 && place <= last, op, ": expected places to be from 0 to ", last,
                    ", got ", place);
  TORCH_CHECK_VALUE(a.reach[0] >= 0 && a.reach[0] <= room, op, ": expected reach of the part at ",
                    "place ", place, " to be from 0 to ", room, ", got ", a.reach[0]);
  const c10::SymInt states = a.each * a.H * a.K * a.V;
  const c10::SymInt own = a.backwards() ? states : states + a.decays_each();
  check.shape("summaries", a.summaries, "[size * a rank's elements]", {own * a.size});
  const auto check_other = [&](const char* name, const OptionalTensor& t, const char* dims,
                               const Sizes& sizes) {
    if (!given(t)) return;
    check.strided(name, *t);
    check.device(name, *t);
    check.like_first(name, *t, dtype);
    check.shape(name, *t, dims, sizes);
  };
  check_other("decays", a.decays, "[size, a rank's decays]", {a.size, a.decays_each()});
  check_other("boundary", a.boundary, a.state_v_first ? "[rows, H, V, K]" : "[rows, H, K, V]",
              a.x_sizes());
}

namespace {

// Results while a graph is traced. Tensors that the halves share have the sizes that the caller was
// told.
TwoTensors summary_meta(const SummaryArguments& a) {
  const Shape s = check_chunk_gla_fwd(whole(a));
  c10::SymInt channels = s.K * s.V;
  if (given(a.g)) channels += s.K;
  if (given(a.gv)) channels += s.V;
  return {empty({s.B * s.H * channels}, a.q, s.accumulate),
          empty({a.prepared_bytes}, a.q, at::kByte)};
}

ForwardOutputs apply_meta(const ApplyArguments& a) {
  const Shape s = check_chunk_gla_fwd(whole(a));
  return {fresh_output(s, a.v), boundary_state_if(a.output_final_state, s, a.q, a.state_v_first),
          empty({s.B, a.segments, s.H, s.K, s.V}, a.q, s.accumulate)};
}

TwoTensors summary_bwd_meta(const SummaryBackwardArguments& a) {
  const Shape s = check_chunk_gla_bwd(whole(a, kAbsent));
  return {boundary_state(s, a.q, false), empty({a.prepared_bytes}, a.q, at::kByte)};
}

BackwardOutputs apply_bwd_meta(const ApplyBackwardArguments& a) {
  return fresh_gradients(check_chunk_gla_bwd(whole(a)), a.q, a.k, a.v, a.g, a.gv, a.initial_state,
                         a.state_v_first);
}

TwoTensors fold_meta(const FoldArguments& a) {
  check_chunk_gla_fold(a);
  const auto dtype = a.summaries.scalar_type();
  return {empty(a.x_sizes(), a.summaries, dtype),
          a.backwards() ? empty({0}, a.summaries, dtype)
                        : empty({a.size, a.decays_each()}, a.summaries, dtype)};
}

constexpr char kInstead[] =
    "it has no gradient of its own, call gla_ext.chunk_gla, or this under torch.no_grad()";

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define_without_gradient<kInstead>(
      m,
      "chunk_gla_summary(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? "
      "initial_state, float? scale, bool state_v_first, bool batch_invariant, bool "
      "for_backward, int prepared_bytes=0) -> (Tensor summary, Tensor prepared)");
  define_without_gradient<kInstead>(
      m,
      "chunk_gla_apply(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? "
      "initial_state, float? scale, bool output_final_state, bool state_v_first, bool "
      "batch_invariant, bool for_backward, Tensor prepared, int segments=0) -> (Tensor o, "
      "Tensor final_state, Tensor entering)");
  define_without_gradient<kInstead>(
      m,
      "chunk_gla_summary_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, "
      "Tensor? gv, float? scale, bool state_v_first, bool batch_invariant, Tensor prepared, int "
      "prepared_bytes=0) -> (Tensor state_grad, Tensor prepared_bwd)");
  define_without_gradient<kInstead>(
      m,
      "chunk_gla_apply_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, "
      "Tensor? gv, Tensor? initial_state, float? scale, bool state_v_first, bool "
      "batch_invariant, Tensor prepared, Tensor entering, Tensor prepared_bwd) -> (Tensor dq, "
      "Tensor dk, Tensor dv, Tensor dg, Tensor dgv, Tensor dh0)");
  define_without_gradient<kInstead>(
      m,
      "chunk_gla_fold(Tensor summaries, Tensor? decays, Tensor? boundary, int size, SymInt "
      "each, SymInt rows, SymInt H, SymInt K, SymInt V, bool key_gated, bool value_gated, bool "
      "state_v_first, int[] places, int[] reach, int[] entered) -> (Tensor x, Tensor decays)");
  autocast_first<3, chunk_gla_summary>(m, "chunk_gla_summary");
  autocast_first<3, chunk_gla_apply>(m, "chunk_gla_apply");
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  register_halves<summary_meta, apply_meta, summary_bwd_meta, apply_bwd_meta, fold_meta>(m);
}

}  // namespace gla_ext
