#include "recurrent_gla.h"

#include "dispatch/checker.h"
#include "dispatch/output.h"

namespace gla_ext {
namespace {

// Shape::H is q's, or without q that of k, HK.
Shape check_tokens(const Checker& check, const RecurrentInputs& in) {
  struct Input {
    const char* name;
    const at::Tensor* t;
  };
  const auto gate = [](const OptionalTensor* t) { return given(*t) ? &**t : nullptr; };
  const std::array<Input, 3> inputs{{{"q", in.q}, {"k", in.k}, {"v", in.v}}};
  const std::array<Input, 2> gates{{{"gk", gate(in.gk)}, {"gv", gate(in.gv)}}};
  const bool has_q = in.q != nullptr;
  const at::Tensor& first = has_q ? *in.q : *in.k;
  const auto for_each = [&](const auto& list, auto&& f) {
    for (const Input& x : list)
      if (x.t != nullptr) f(x);
  };
  for_each(inputs, [&](const Input& x) { check.defined(x.name, *x.t); });
  for_each(inputs, [&](const Input& x) { check.strided(x.name, *x.t); });
  for_each(gates, [&](const Input& x) { check.strided(x.name, *x.t); });
  for_each(inputs, [&](const Input& x) { check.device(x.name, *x.t); });
  for_each(gates, [&](const Input& x) { check.device(x.name, *x.t); });
  check.floating(has_q ? "q" : "k", first);
  for_each(inputs, [&](const Input& x) { check.like_first(x.name, *x.t, first.scalar_type()); });
  const bool fp64 = first.scalar_type() == at::kDouble;
  for_each(gates, [&](const Input& x) { check.gate_dtype(x.name, *x.t, fp64); });
  if (has_q) check.rank("q", *in.q, 4, "[B, T, H, K]");
  check.rank("k", *in.k, 4, "[B, T, HK, K]");
  check.rank("v", *in.v, 4, "[B, T, HK, V]");
  Shape shape{first.sym_size(0),
              first.sym_size(1),
              first.sym_size(2),
              first.sym_size(3),
              in.v->sym_size(3),
              0,
              0};
  shape.dtype = first.scalar_type();
  shape.accumulate = fp64 ? at::kDouble : at::kFloat;
  check.at_least_one("the last dimension", has_q ? "q" : "k", shape.K);
  check.at_least_one("the last dimension", "v", shape.V);
  const c10::SymInt HK = in.k->sym_size(2);
  const Sizes keys{shape.B, shape.T, HK, shape.K}, values{shape.B, shape.T, HK, shape.V};
  check.shape("k", *in.k, "[B, T, HK, K]", keys);
  if (has_q) check.divides_heads(HK, shape.H);
  check.shape("v", *in.v, "[B, T, HK, V]", values);
  if (given(*in.gk)) check.key_gate("gk", **in.gk, keys);
  if (given(*in.gv)) check.shape("gv", **in.gv, "[B, T, HK, V]", values);
  return shape;
}

Shape check_sequences(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const OptionalTensor& gk, const OptionalTensor& gv,
                      const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                      bool state_v_first) {
  const Checker check(op, "q", q);
  Shape shape = check_tokens(check, {op, &q, &k, &v, &gk, &gv});
  check.offsets(cu_seqlens, shape);
  check.state("initial_state", initial_state, shape, state_v_first);
  return shape;
}

}  // namespace

Shape check_recurrent_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const OptionalTensor& gk, const OptionalTensor& gv,
                          const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                          bool state_v_first) {
  return check_sequences("fused_recurrent_gla", q, k, v, gk, gv, initial_state, cu_seqlens,
                         state_v_first);
}

Shape check_recurrent_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                          const OptionalTensor& gv, const OptionalTensor& initial_state,
                          const OptionalTensor& cu_seqlens, bool state_v_first) {
  const char* op = "recurrent_gla_bwd";
  Shape shape = check_sequences(op, q, k, v, gk, gv, initial_state, cu_seqlens, state_v_first);
  const Checker check(op, "q", q);
  check.defined("do", d_o);
  check.strided("do", d_o);
  check.device("do", d_o);
  check.like_first("do", d_o, q.scalar_type());
  check.shape("do", d_o, "[B, T, H, V]", {shape.B, shape.T, shape.H, shape.V});
  check.state("dht", dht, shape, state_v_first);
  return shape;
}

Shape check_pool(const RecurrentInputs& tokens, const PoolInputs& pool) {
  const at::Tensor& first = tokens.q != nullptr ? *tokens.q : *tokens.k;
  const Checker check(tokens.op, tokens.q != nullptr ? "q" : "k", first);
  Shape shape = check_tokens(check, tokens);
  const at::Tensor& state = pool.state;
  check.defined("state", state);
  check.strided("state", state);
  check.device("state", state);
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
  if (pool.state_v_first)
    check.shape("state", state, dims, {P, shape.H, shape.V, shape.K});
  else
    check.shape("state", state, dims, {P, shape.H, shape.K, shape.V});
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

void check_pool_layout(const char* op, const at::Tensor& state, bool written, const char* name) {
  const auto sizes = state.sizes(), strides = state.strides();
  const bool contiguous =
      (sizes[3] == 1 || strides[3] == 1) && (sizes[2] == 1 || strides[2] == sizes[3]);
  TORCH_CHECK_VALUE(contiguous, op, ": expected the last two dimensions of ", name,
                    " to be contiguous, got strides ", strides);
  if (!written || state.numel() == 0) return;
  int64_t extent = sizes[2] * sizes[3];  // of what one step of the next dimension must pass
  const int inner = strides[0] < strides[1] ? 0 : 1;
  for (const int dim : {inner, 1 - inner}) {
    if (sizes[dim] == 1) continue;
    TORCH_CHECK_VALUE(strides[dim] >= extent, op, ": expected the matrices of ", name,
                      " to lie apart, got sizes ", sizes, " with strides ", strides);
    extent += strides[dim] * (sizes[dim] - 1);
  }
}

void check_out_layout(const RecurrentInputs& tokens, const PoolInputs& pool) {
  const auto gate = [](const OptionalTensor* t) { return given(*t) ? &**t : nullptr; };
  check_out_layout(tokens.op, *pool.out,
                   {{"q", tokens.q},
                    {"k", tokens.k},
                    {"v", tokens.v},
                    {"gk", gate(tokens.gk)},
                    {"gv", gate(tokens.gv)},
                    {"state", &pool.state}});
}

}  // namespace gla_ext
