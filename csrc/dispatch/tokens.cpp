#include "tokens.h"

namespace gla_ext {

Shape check_tokens(const Checker& check, const TokenInputs& in) {
  const bool has_q = in.q != nullptr;
  const at::Tensor &first = has_q ? *in.q : *in.k, &k = *in.k, &v = *in.v;
  const char* first_name = has_q ? "q" : "k";
  const NamedTensors inputs{{"q", in.q}, {"k", &k}, {"v", &v}};
  const NamedTensors gates{{in.key_gate, where_given(*in.gk)}, {"gv", where_given(*in.gv)}};
  check.placed(inputs, gates);
  check.floating(first_name, first);
  for_each_given(inputs, [&](const char* name, const at::Tensor& t) {
    check.like_first(name, t, first.scalar_type());
  });
  const bool fp64 = first.scalar_type() == at::kDouble;
  for_each_given(gates,
                 [&](const char* name, const at::Tensor& t) { check.gate_dtype(name, t, fp64); });
  if (has_q) check.rank("q", *in.q, 4, "[B, T, H, K]");
  check.rank("k", k, 4, "[B, T, HK, K]");
  check.rank("v", v, 4, "[B, T, HK, V]");
  const auto sizes = first.sym_sizes();
  Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], v.sym_size(3), 0, 0};
  shape.dtype = first.scalar_type();
  shape.accumulate = fp64 ? at::kDouble : at::kFloat;
  check.at_least_one("the last dimension", first_name, shape.K);
  check.at_least_one("the last dimension", "v", shape.V);
  const c10::SymInt HK = k.sym_size(2);
  const Sizes keys{shape.B, shape.T, HK, shape.K}, values{shape.B, shape.T, HK, shape.V};
  check.shape("k", k, "[B, T, HK, K]", keys);
  if (has_q) check.divides_heads(HK, shape.H);
  check.shape("v", v, "[B, T, HK, V]", values);
  if (given(*in.gk)) check.key_gate(in.key_gate, **in.gk, keys);
  if (given(*in.gv)) check.shape("gv", **in.gv, "[B, T, HK, V]", values);
  return shape;
}

void check_output_grad(const Checker& check, const at::Tensor& d_o, const Shape& shape) {
  check.like("do", d_o);
  check.shape("do", d_o, "[B, T, H, V]", {shape.B, shape.T, shape.H, shape.V});
}

}  // namespace gla_ext
