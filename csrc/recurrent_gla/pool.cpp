// The recurrence on a pool of states.
#include "dispatch/autocast.h"
#include "dispatch/in_place.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/output.h"
#include "dispatch/schema.h"
#include "op.h"

namespace gla_ext {

at::Tensor recurrent_gla_step_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& gk, const OptionalTensor& gv,
                               at::Tensor& state, const OptionalTensor& slots,
                               std::optional<double> scale, bool state_v_first,
                               const OptionalTensor& write_slots) {
  static const Op<decltype(recurrent_gla_step_)> op("gla_ext::recurrent_gla_step_");
  return op(q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots);
}

void recurrent_gla_step_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const OptionalTensor& gk, const OptionalTensor& gv, at::Tensor& state,
                            const OptionalTensor& slots, std::optional<double> scale,
                            bool state_v_first, const OptionalTensor& write_slots,
                            at::Tensor& out) {
  static const Op<decltype(recurrent_gla_step_out)> op("gla_ext::recurrent_gla_step_", "out");
  op(q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots, out);
}

at::Tensor recurrent_gla_verify(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const OptionalTensor& gk, const OptionalTensor& gv,
                                const at::Tensor& state, const OptionalTensor& slots,
                                std::optional<double> scale, bool state_v_first,
                                const OptionalTensor& cu_seqlens) {
  static const Op<decltype(recurrent_gla_verify)> op("gla_ext::recurrent_gla_verify");
  return op(q, k, v, gk, gv, state, slots, scale, state_v_first, cu_seqlens);
}

void recurrent_gla_verify_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const OptionalTensor& gk, const OptionalTensor& gv,
                              const at::Tensor& state, const OptionalTensor& slots,
                              std::optional<double> scale, bool state_v_first,
                              const OptionalTensor& cu_seqlens, at::Tensor& out) {
  static const Op<decltype(recurrent_gla_verify_out)> op("gla_ext::recurrent_gla_verify", "out");
  op(q, k, v, gk, gv, state, slots, scale, state_v_first, cu_seqlens, out);
}

void recurrent_gla_commit_(const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                           const OptionalTensor& gv, at::Tensor& state, const OptionalTensor& slots,
                           const at::Tensor& accepted, bool state_v_first,
                           const OptionalTensor& cu_seqlens, const OptionalTensor& write_slots) {
  static const Op<decltype(recurrent_gla_commit_)> op("gla_ext::recurrent_gla_commit_");
  op(k, v, gk, gv, state, slots, accepted, state_v_first, cu_seqlens, write_slots);
}

// Checks of the operators' arguments.
Shape check_pool(const TokenInputs& tokens, const PoolInputs& pool) {
  const at::Tensor& first = tokens.q != nullptr ? *tokens.q : *tokens.k;
  const Checker check(tokens.op, tokens.q != nullptr ? "q" : "k", first);
  Shape shape = check_tokens(check, tokens);
  const at::Tensor& state = pool.state;
  check.placed("state", state);
  check.gate_dtype("state", state, shape.accumulate == at::kDouble);
  const char* dims = pool.state_v_first ? "[P, H, V, K]" : "[P, H, K, V]";
  check.rank("state", state, 4, dims);
  if (tokens.q == nullptr) {
    check.divides_heads(shape.H, state.sym_size(1));
    shape.H = state.sym_size(1);
  }
  check.offsets(pool.cu_seqlens != nullptr ? *pool.cu_seqlens : std::nullopt, shape);
  // Without slots, row n's is n.
  const c10::SymInt P = given(pool.slots) ? state.sym_size(0) : shape.N;
  check.shape("state", state, dims, states(shape, P, pool.state_v_first));
  const char* rows = shape.packed ? "[N]" : "[B]";
  check.indices_of("slots", pool.slots, rows, shape.N);
  if (pool.write_slots != nullptr)
    check.indices_of("write_slots", *pool.write_slots, rows, shape.N);
  if (pool.accepted != nullptr) {
    check.defined("accepted", *pool.accepted);
    check.indices_of("accepted", *pool.accepted, rows, shape.N);
  }
  if (pool.out != nullptr)
    check_out(check, *pool.out, shape.dtype, "[B, T, H, V]", {shape.B, shape.T, shape.H, shape.V});
  return shape;
}

void check_layouts(const TokenInputs& tokens, const PoolInputs& pool, bool write) {
  check_pool_layout(tokens.op, pool.state, write);
  if (pool.out == nullptr) return;
  check_out_layout(tokens.op, *pool.out,
                   {{"q", tokens.q},
                    {"k", tokens.k},
                    {"v", tokens.v},
                    {"gk", where_given(*tokens.gk)},
                    {"gv", where_given(*tokens.gv)},
                    {"state", &pool.state}});
}

namespace {

// Results of the operators while a graph is traced.
at::Tensor on_pool_meta(const TokenInputs& in, const PoolInputs& pool, std::optional<double>,
                        bool) {
  const Shape s = check_pool(in, pool);
  return in.q != nullptr && pool.out == nullptr ? fresh_output(s, *in.v) : at::Tensor();
}

constexpr const char* kInstead =
    "decoding on a pool has no gradient, call gla_ext.fused_recurrent_gla, or run it under "
    "torch.no_grad()";
constexpr Refusal kStep{"recurrent_gla_step_", kInstead};
constexpr Refusal kVerify{"recurrent_gla_verify", kInstead};
constexpr Refusal kCommit{"recurrent_gla_commit_", kInstead};

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define_with_out(
      m, "recurrent_gla_step_",
      "Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor(a!) state, Tensor? slots, "
      "float? scale, bool state_v_first, Tensor? write_slots=None",
      'b');
  define_with_out(
      m, "recurrent_gla_verify",
      "Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor state, Tensor? slots, float? "
      "scale, bool state_v_first, Tensor? cu_seqlens=None",
      'a');
  define(m,
         "recurrent_gla_commit_(Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor(a!) state, "
         "Tensor? slots, Tensor accepted, bool state_v_first, Tensor? cu_seqlens=None, Tensor? "
         "write_slots=None) -> ()");
  autocast_first<3, recurrent_gla_step_>(m, "recurrent_gla_step_");
  autocast_first<3, recurrent_gla_step_out>(m, "recurrent_gla_step_.out");
  autocast_first<3, recurrent_gla_verify>(m, "recurrent_gla_verify");
  autocast_first<3, recurrent_gla_verify_out>(m, "recurrent_gla_verify.out");
  autocast_first<2, recurrent_gla_commit_>(m, "recurrent_gla_commit_");
  in_place<recurrent_gla_step_, kStep>(m, "recurrent_gla_step_");
  in_place<recurrent_gla_step_out, kStep>(m, "recurrent_gla_step_.out");
  in_place<recurrent_gla_verify, kVerify>(m, "recurrent_gla_verify");
  in_place<recurrent_gla_verify_out, kVerify>(m, "recurrent_gla_verify.out");
  in_place<recurrent_gla_commit_, kCommit>(m, "recurrent_gla_commit_");
  refuse_vmap(m, {"recurrent_gla_step_", "recurrent_gla_step_.out", "recurrent_gla_verify.out",
                  "recurrent_gla_commit_"});
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { RecurrentOnPool<on_pool_meta>::register_in(m); }

}  // namespace gla_ext
