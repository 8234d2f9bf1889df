#include "checks.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "checker.h"
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
  if (given(g)) check.shape("g", *g, "[B, T, HK, K]", keys);
  if (given(gv)) check.shape("gv", *gv, "[B, T, HK, V]", values);
  check.offsets(a.cu_seqlens, shape);
  check.state("initial_state", a.initial_state, shape, a.state_v_first);
  return shape;
}

// A [B, T, H, D] tensor of a step. `last` names the size of D: K, V, C or c.
struct StepTensor {
  const char* name;
  const at::Tensor* t;
  const char* dims;
  char last;
  bool is_input;  // has the user's dtype; the others are intermediates
};

// Those that the step takes, in the order of the checks.
std::vector<StepTensor> step_tensors(const StepInputs& in) {
  const char *keys = "[B, T, H, K]", *values = "[B, T, H, V]";
  std::vector<StepTensor> tensors;
  for (const StepTensor& x :
       {StepTensor{"q", in.q, keys, 'K', true}, StepTensor{"k", in.k, keys, 'K', true},
        StepTensor{"v", in.v, values, 'V', true}, StepTensor{"do", in.d_o, values, 'V', true},
        StepTensor{"g", in.g, keys, 'K', true}, StepTensor{"b", in.b, keys, 'K', false},
        StepTensor{"A", in.A, "[B, T, H, 64]", 'C', false},
        StepTensor{"A_diagonal", in.A_diagonal, "[B, T, H, 16]", 'c', false},
        StepTensor{"dA", in.dA, "[B, T, H, 64]", 'C', false},
        StepTensor{"dq", in.dq, keys, 'K', false}, StepTensor{"dk", in.dk, keys, 'K', false},
        StepTensor{"dg", in.dg, keys, 'K', false}})
    if (x.t != nullptr) tensors.push_back(x);
  return tensors;
}

// K or V, from the first tensor that has it; 1 where the step has none.
c10::SymInt last_dimension(const std::vector<StepTensor>& tensors, char which) {
  for (const StepTensor& x : tensors)
    if (x.last == which) return x.t->sym_size(3);
  return 1;
}

}  // namespace

std::string dtype_name(at::ScalarType t) {
  switch (t) {
    case at::kBFloat16:
      return "torch.bfloat16";
    case at::kHalf:
      return "torch.float16";
    case at::kFloat:
      return "torch.float32";
    case at::kDouble:
      return "torch.float64";
    case at::kByte:
      return "torch.uint8";
    case at::kInt:
      return "torch.int32";
    case at::kLong:
      return "torch.int64";
    default:
      return c10::str("torch.", c10::toString(t));
  }
}

std::string public_name(const std::string& schema_name) {
  const std::string name = schema_name.substr(schema_name.find("::") + 2);
  if (name == "recurrent_gla_fwd") return "fused_recurrent_gla";
  if (name == "rms_norm_gate_fwd") return "rms_norm_gate";
  if (name == "rms_norm_residual_fwd") return "rms_norm_residual";
  if (name == "cross_entropy_fwd") return "cross_entropy";
  if (name == "linear_cross_entropy_fwd") return "linear_cross_entropy";
  if (name == "gate_projection_fwd") return "gate_projection";
  if (name == "swiglu_fwd") return "swiglu";
  if (name == "short_convolution_fwd") return "ShortConvolution";
  return name == "chunk_gla_fwd" ? "chunk_gla" : name;
}

double resolve_scale(std::optional<double> scale, int64_t K) {
  return scale.has_value() ? *scale : 1 / std::sqrt(static_cast<double>(K));
}

Shape check_chunk_gla_fwd(const ForwardArguments& a) { return check_inputs("chunk_gla", a); }

int64_t check_kept_bytes(const char* op, int64_t kept_bytes) {
  TORCH_CHECK_VALUE(kept_bytes >= kPlannedBytes, op, ": expected kept_bytes to be at least ",
                    kPlannedBytes, ", got ", kept_bytes);
  return std::max<int64_t>(kept_bytes, 0);
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
  if (given(a.kept)) {
    check.device("kept", *a.kept);
    check.dtype("kept", *a.kept, at::kByte, " (as chunk_gla_fwd keeps it)");
    check.rank("kept", *a.kept, 1, "[bytes]");
  }
  return shape;
}

Shape check_step(const StepInputs& in) {
  const std::vector<StepTensor> tensors = step_tensors(in);
  const StepTensor& first = tensors.front();
  const Checker check(in.op, first.name, *first.t);
  for (const StepTensor& x : tensors) check.defined(x.name, *x.t);
  for (const StepTensor& x : tensors) {
    check.strided(x.name, *x.t);
    check.device(x.name, *x.t);
  }
  check.floating(first.name, *first.t);
  Shape shape;
  shape.dtype = first.t->scalar_type();
  shape.accumulate = first.t->scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const StepTensor& x : tensors) {
    if (x.t == in.g) {
      check.gate_dtype(x.name, *x.t, shape.accumulate == at::kDouble);
    } else {
      check.dtype(x.name, *x.t, x.is_input ? first.t->scalar_type() : shape.accumulate, "");
    }
    check.rank(x.name, *x.t, 4, x.dims);
  }
  shape.B = first.t->sym_size(0);
  shape.T = first.t->sym_size(1);
  shape.H = first.t->sym_size(2);
  shape.K = last_dimension(tensors, 'K');
  shape.V = last_dimension(tensors, 'V');
  check.at_least_one("the last dimension", "the keys", shape.K);
  check.at_least_one("the last dimension", "the values", shape.V);
  for (const StepTensor& x : tensors) {
    const c10::SymInt last = x.last == 'K'   ? shape.K
                             : x.last == 'V' ? shape.V
                                             : c10::SymInt(x.last == 'C' ? kChunk : kSubChunk);
    check.shape(x.name, *x.t, x.dims, {shape.B, shape.T, shape.H, last});
  }
  check.offsets(in.cu_seqlens, shape);
  for (const auto& [name, t] : {std::pair{"S", in.S}, std::pair{"dS", in.dS}}) {
    if (t == nullptr) continue;
    check.strided(name, *t);
    check.device(name, *t);
    check.dtype(name, *t, shape.accumulate, "");
    check.shape(name, *t, "[B, NT, H, K, V]", {shape.B, shape.chunks, shape.H, shape.K, shape.V});
  }
  check.state("initial_state", in.initial_state, shape, in.state_v_first);
  check.state("dht", in.dht, shape, in.state_v_first);
  return shape;
}

void check_defined(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), op, ": expected ", name, " to be a tensor, got None");
}

void check_scale_given(const char* op, std::optional<double> scale) {
  TORCH_CHECK_TYPE(scale.has_value(), op,
                   ": expected scale to be a float (its default, K ** -0.5, needs K), got None");
}

at::Tensor checked_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t T) {
  const at::Tensor cu = cu_seqlens.to(at::kLong).contiguous();
  const auto* offsets = cu.const_data_ptr<int64_t>();
  const int64_t last = cu.numel() - 1;
  TORCH_CHECK_VALUE(offsets[0] == 0, op, ": expected cu_seqlens to start with 0, got ", offsets[0]);
  for (int64_t n = 0; n < last; ++n)
    TORCH_CHECK_VALUE(offsets[n] <= offsets[n + 1], op,
                      ": expected cu_seqlens to be non-decreasing, got ", offsets[n], " before ",
                      offsets[n + 1], " at position ", n);
  TORCH_CHECK_VALUE(offsets[last] <= T, op, ": expected cu_seqlens to end at or before T = ", T,
                    ", got ", offsets[last]);
  return cu;
}

}  // namespace gla_ext
