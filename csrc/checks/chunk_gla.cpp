#include "chunk_gla.h"

#include <algorithm>
#include <cmath>

#include "dispatch/checker.h"
#include "ops.h"

namespace gla_ext {
namespace {

// What both passes are given.
template <class Arguments>
Shape check_inputs(const char* op, const Arguments& a) {
  const at::Tensor &q = a.q, &k = a.k, &v = a.v;
  const OptionalTensor &g = a.g, &gv = a.gv;
  const Checker check(op, "q", q);
  std::vector<std::pair<const char*, const at::Tensor*>> inputs{{"q", &q}, {"k", &k}, {"v", &v}};
  if (given(g)) inputs.emplace_back("g", &*g);
  if (given(gv)) inputs.emplace_back("gv", &*gv);
  for (const auto& [name, t] : inputs) check.defined(name, *t);
  for (const auto& [name, t] : inputs) check.strided(name, *t);
  for (const auto& [name, t] : inputs) check.device(name, *t);
  check.floating("q", q);
  check.dtype("k", k, q.scalar_type(), " like q");
  check.dtype("v", v, q.scalar_type(), " like q");
  const bool fp64 = q.scalar_type() == at::kDouble;
  if (given(g)) check.gate_dtype("g", *g, fp64);
  if (given(gv)) check.gate_dtype("gv", *gv, fp64);
  check.rank("q", q, 4, "[B, T, H, K]");
  check.rank("k", k, 4, "[B, T, HK, K]");
  check.rank("v", v, 4, "[B, T, HK, V]");
  Shape shape{q.sym_size(0), q.sym_size(1), q.sym_size(2), q.sym_size(3), v.sym_size(3), 0, 0};
  shape.dtype = q.scalar_type();
  shape.accumulate = fp64 ? at::kDouble : at::kFloat;
  check.at_least_one("the last dimension", "q", shape.K);
  check.at_least_one("the last dimension", "v", shape.V);
  const c10::SymInt HK = k.sym_size(2);
  const Sizes keys{shape.B, shape.T, HK, shape.K}, values{shape.B, shape.T, HK, shape.V};
  check.shape("k", k, "[B, T, HK, K]", keys);
  check.divides_heads(HK, shape.H);
  check.shape("v", v, "[B, T, HK, V]", values);
  if (given(g)) check.key_gate("g", *g, keys);
  if (given(gv)) check.shape("gv", *gv, "[B, T, HK, V]", values);
  check.offsets(a.cu_seqlens, shape);
  check.state("initial_state", a.initial_state, shape, a.state_v_first);
  return shape;
}

}  // namespace

double resolve_scale(std::optional<double> scale, int64_t K) {
  return scale.has_value() ? *scale : 1 / std::sqrt(static_cast<double>(K));
}

Shape check_chunk_inputs(const char* op, const ForwardArguments& a) { return check_inputs(op, a); }

Shape check_chunk_gla_fwd(const ForwardArguments& a) { return check_inputs("chunk_gla", a); }

int64_t check_for_backward_bytes(const char* op, int64_t for_backward_bytes) {
  TORCH_CHECK_VALUE(for_backward_bytes >= kPlannedBytes, op,
                    ": expected for_backward_bytes to be at least ", kPlannedBytes, ", got ",
                    for_backward_bytes);
  return std::max<int64_t>(for_backward_bytes, 0);
}

Shape check_chunk_gla_bwd(const BackwardArguments& a) {
  const char* op = "chunk_gla_bwd";
  const Shape shape = check_inputs(op, a);
  const Checker check(op, "q", a.q);
  check.strided("do", a.d_o);
  check.device("do", a.d_o);
  check.dtype("do", a.d_o, a.q.scalar_type(), " like q");
  check.shape("do", a.d_o, "[B, T, H, V]", {shape.B, shape.T, shape.H, shape.V});
  check.state("dht", a.dht, shape, a.state_v_first);
  if (given(a.for_backward)) {
    check.device("for_backward", *a.for_backward);
    check.dtype("for_backward", *a.for_backward, at::kByte, " (as chunk_gla_fwd leaves it)");
    check.rank("for_backward", *a.for_backward, 1, "[bytes]");
  }
  return shape;
}

}  // namespace gla_ext
