#include "checks.h"

#include <c10/util/Exception.h>

#include <array>
#include <cmath>

namespace gla_ext {
namespace {

using Sizes = std::vector<c10::SymInt>;

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
    case at::kInt:
      return "torch.int32";
    case at::kLong:
      return "torch.int64";
    default:
      return c10::str("torch.", c10::toString(t));
  }
}

bool holds(const c10::SymBool& condition) { return condition.expect_true(__FILE__, __LINE__); }

// One call's checks: the operator's name for the messages and what all tensors must agree with.
class Checker {
 public:
  Checker(const char* op, const char* first_name, const at::Tensor& first)
      : op_(op), first_name_(first_name), device_(at::kCPU) {
    defined(first_name, first);
    device_ = first.device();
  }

  void defined(const char* name, const at::Tensor& t) const { check_defined(op_, name, t); }

  void strided(const char* name, const at::Tensor& t) const {
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, op_, ": expected ", name,
                                " to be a strided (dense) tensor, got layout ", t.layout());
  }

  void device(const char* name, const at::Tensor& t) const {
    TORCH_CHECK_VALUE(t.device() == device_, op_, ": expected ", name, " on the device of ",
                      first_name_, ", ", device_, ", got ", t.device());
  }

  void dtype(const char* name, const at::Tensor& t, at::ScalarType expected,
             const char* why) const {
    TORCH_CHECK_TYPE(t.scalar_type() == expected, op_, ": expected ", name, " to be ",
                     dtype_name(expected), why, ", got ", dtype_name(t.scalar_type()));
  }

  void floating(const char* name, const at::Tensor& t) const {
    const auto s = t.scalar_type();
    TORCH_CHECK_TYPE(s == at::kBFloat16 || s == at::kHalf || s == at::kFloat || s == at::kDouble,
                     op_, ": expected ", name,
                     " to be torch.bfloat16, torch.float16, torch.float32 or torch.float64, got ",
                     dtype_name(s));
  }

  // Gates may be of any of the three shorter types beside inputs of those types, and fp64 beside
  // fp64.
  void gate_dtype(const char* name, const at::Tensor& t, bool fp64) const {
    const auto s = t.scalar_type();
    if (fp64) return dtype(name, t, at::kDouble, " like q");
    TORCH_CHECK_TYPE(s == at::kBFloat16 || s == at::kHalf || s == at::kFloat, op_, ": expected ",
                     name, " to be torch.bfloat16, torch.float16 or torch.float32, got ",
                     dtype_name(s));
  }

  void rank(const char* name, const at::Tensor& t, int64_t rank, const char* dims) const {
    TORCH_CHECK_VALUE(t.dim() == rank, op_, ": expected ", name, " to have ", rank, " dimension",
                      rank == 1 ? "" : "s", " ", dims, ", got ", t.dim(), " with shape ",
                      t.sym_sizes());
  }

  void shape(const char* name, const at::Tensor& t, const char* dims, const Sizes& expected) const {
    rank(name, t, static_cast<int64_t>(expected.size()), dims);
    for (size_t i = 0; i < expected.size(); ++i)
      TORCH_CHECK_VALUE(holds(t.sym_size(static_cast<int64_t>(i)).sym_eq(expected[i])), op_,
                        ": expected ", name, " to have shape ", dims, " = ",
                        c10::SymIntArrayRef(expected), ", got ", t.sym_sizes());
  }

  void at_least_one(const char* what, const char* name, const c10::SymInt& size) const {
    TORCH_CHECK_VALUE(holds(size.sym_ge(1)), op_, ": expected ", what, " of ", name,
                      " to be at least 1, got ", size);
  }

  // Device, dtype and rank of cu_seqlens; its length gives N.
  void offsets(const OptionalTensor& cu_seqlens, Shape& shape) const {
    shape.packed = given(cu_seqlens);
    if (!shape.packed) {
      shape.N = shape.B;
      shape.chunks = (shape.T + kChunk - 1) / kChunk;
      return;
    }
    const at::Tensor& cu = *cu_seqlens;
    strided("cu_seqlens", cu);
    device("cu_seqlens", cu);
    TORCH_CHECK_TYPE(cu.scalar_type() == at::kInt || cu.scalar_type() == at::kLong, op_,
                     ": expected cu_seqlens to be torch.int32 or torch.int64, got ",
                     dtype_name(cu.scalar_type()));
    rank("cu_seqlens", cu, 1, "[N + 1]");
    TORCH_CHECK_VALUE(holds(cu.sym_size(0).sym_ge(1)), op_,
                      ": expected cu_seqlens to have at least 1 element (N + 1 offsets), got ",
                      cu.sym_size(0));
    TORCH_CHECK_VALUE(holds(shape.B.sym_eq(1)), op_,
                      ": expected batch size 1 with cu_seqlens (sequences packed in one row), got ",
                      shape.B);
    shape.N = cu.sym_size(0) - 1;
    shape.chunks = shape.T / kChunk + shape.N;
  }

  void state(const char* name, const OptionalTensor& t, const Shape& shape, bool v_first) const {
    if (!given(t)) return;
    strided(name, *t);
    device(name, *t);
    dtype(name, *t, shape.accumulate, "");
    if (v_first)
      this->shape(name, *t, "[N, H, V, K]", {shape.N, shape.H, shape.V, shape.K});
    else
      this->shape(name, *t, "[N, H, K, V]", {shape.N, shape.H, shape.K, shape.V});
  }

 private:
  const char *op_, *first_name_;
  at::Device device_;
};

Shape check_inputs(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& g, const OptionalTensor& gv,
                   const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                   bool state_v_first) {
  const Checker check(op, "q", q);
  const std::array<std::pair<const char*, const at::Tensor*>, 4> inputs{
      {{"q", &q}, {"k", &k}, {"v", &v}, {"g", &g}}};
  for (const auto& [name, t] : inputs) check.defined(name, *t);
  for (const auto& [name, t] : inputs) check.strided(name, *t);
  for (const auto& [name, t] : inputs) check.device(name, *t);
  check.floating("q", q);
  check.dtype("k", k, q.scalar_type(), " like q");
  check.dtype("v", v, q.scalar_type(), " like q");
  const bool fp64 = q.scalar_type() == at::kDouble;
  check.gate_dtype("g", g, fp64);
  check.rank("q", q, 4, "[B, T, H, K]");
  check.rank("v", v, 4, "[B, T, H, V]");
  Shape shape{q.sym_size(0), q.sym_size(1), q.sym_size(2), q.sym_size(3), v.sym_size(3), 0, 0};
  shape.dtype = q.scalar_type();
  shape.accumulate = fp64 ? at::kDouble : at::kFloat;
  check.at_least_one("the last dimension", "q", shape.K);
  check.at_least_one("the last dimension", "v", shape.V);
  const Sizes keys{shape.B, shape.T, shape.H, shape.K}, values{shape.B, shape.T, shape.H, shape.V};
  check.shape("k", k, "[B, T, H, K]", keys);
  check.shape("v", v, "[B, T, H, V]", values);
  check.shape("g", g, "[B, T, H, K]", keys);
  check.offsets(cu_seqlens, shape);
  check.state("initial_state", initial_state, shape, state_v_first);
  if (given(gv)) {
    check.strided("gv", *gv);
    check.device("gv", *gv);
    check.gate_dtype("gv", *gv, fp64);
    check.shape("gv", *gv, "[B, T, H, V]", values);
    TORCH_CHECK_NOT_IMPLEMENTED(false, op,
                                ": value gates (gv) are not implemented yet, pass gv=None");
  }
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

std::string public_name(const std::string& schema_name) {
  const std::string name = schema_name.substr(schema_name.find("::") + 2);
  return name == "chunk_gla_fwd" ? "chunk_gla" : name;
}

double resolve_scale(std::optional<double> scale, int64_t K) {
  return scale.has_value() ? *scale : 1 / std::sqrt(static_cast<double>(K));
}

Shape check_chunk_gla_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& g, const OptionalTensor& gv,
                          const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                          bool state_v_first) {
  return check_inputs("chunk_gla", q, k, v, g, gv, initial_state, cu_seqlens, state_v_first);
}

Shape check_chunk_gla_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                          const OptionalTensor& gv, const OptionalTensor& initial_state,
                          const OptionalTensor& cu_seqlens, const at::Tensor& states,
                          bool state_v_first) {
  const char* op = "chunk_gla_bwd";
  Shape shape = check_inputs(op, q, k, v, g, gv, initial_state, cu_seqlens, state_v_first);
  const Checker check(op, "q", q);
  check.strided("do", d_o);
  check.device("do", d_o);
  check.dtype("do", d_o, q.scalar_type(), " like q");
  check.shape("do", d_o, "[B, T, H, V]", {shape.B, shape.T, shape.H, shape.V});
  check.state("dht", dht, shape, state_v_first);
  check.device("states", states);
  if (states.dim() == 1) {  // not saved
    check.shape("states", states, "[0] (not saved)", {0});
    return shape;
  }
  check.dtype("states", states, saved_states_dtype(q), " (as chunk_gla_fwd saves them)");
  check.shape("states", states, "[B, NT, H, K, V]",
              {shape.B, shape.chunks, shape.H, shape.K, shape.V});
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
