// The steps of csrc/README.md as operators; forward 1 and 2 are backward 1 and 2.
#include "op.h"

#include "dispatch/checker.h"
#include "dispatch/in_place.h"
#include "dispatch/meta.h"
#include "dispatch/schema.h"

namespace gla_ext {
namespace {

// A [B, T, H, D] tensor of a step. `last` names the size of D: K, V, C or c.
struct StepTensor {
  const char* name;
  const at::Tensor* t;
  const char* dims;
  char last;
  bool is_input;  // has the user's dtype; the others are intermediates
};

// The tensors that the step takes, in the order of the checks.
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

// K or V, from the first tensor that has it; 1 if there is none.
c10::SymInt last_dimension(const std::vector<StepTensor>& tensors, char which) {
  for (const StepTensor& x : tensors)
    if (x.last == which) return x.t->sym_size(3);
  return 1;
}

}  // namespace

const at::Tensor& StepInputs::first() const { return *step_tensors(*this).front().t; }

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
    check.placed(name, *t);
    check.dtype(name, *t, shape.accumulate, "");
    check.shape(name, *t, "[B, NT, H, K, V]", {shape.B, shape.chunks, shape.H, shape.K, shape.V});
  }
  check.state("initial_state", in.initial_state, shape, in.state_v_first);
  check.state("dht", in.dht, shape, in.state_v_first);
  return shape;
}

void check_scale_given(const char* op, std::optional<double> scale) {
  TORCH_CHECK_TYPE(scale.has_value(), op,
                   ": expected scale to be a float (its default, K ** -0.5, needs K), got None");
}

// Results of the operators while a graph is traced.
namespace {

struct TracedStep {
  const StepInputs& in;
  const Shape s;

  at::Tensor rows(const c10::SymInt& last) const {
    return empty({s.B, s.T, s.H, last}, in.first(), s.accumulate);
  }
  TwoTensors states() const {
    return {empty({s.B, s.chunks, s.H, s.K, s.V}, in.first(), s.accumulate),
            boundary_state(s, in.first(), in.state_v_first)};
  }

  at::Tensor gate_cumsum() const { return rows(s.K); }
  TwoTensors chunk_states() const { return states(); }
  at::Tensor scores_off_diagonal() const { return rows(kChunk); }
  at::Tensor scores_diagonal() const { return rows(kSubChunk); }
  at::Tensor output() const { return fresh(*in.v); }
  TwoTensors state_grads() const { return states(); }
  at::Tensor value_grads() const { return fresh(*in.d_o); }
  at::Tensor score_grads() const { return rows(kChunk); }
  ThreeTensors intra_grads() const { return {rows(s.K), rows(s.K), rows(s.K)}; }
  ThreeTensors merge_grads() const { return {fresh(*in.q), fresh(*in.k), rows(s.K)}; }
};

struct Traced {
  template <typename F>
  static auto run(const StepInputs& in, const F& f) {
    return f(TracedStep{in, check_step(in)});
  }
};

constexpr char kInstead[] =
    "it has no gradient of its own, call gla_ext.chunk_gla, or this under torch.no_grad()";

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m, "_gate_cumsum(Tensor g, Tensor? cu_seqlens) -> Tensor");
  define(m,
         "_chunk_states(Tensor k, Tensor v, Tensor b, Tensor? initial_state, Tensor? cu_seqlens, "
         "bool state_v_first) -> (Tensor S, Tensor final_state)");
  define(m,
         "_scores_off_diagonal(Tensor q, Tensor k, Tensor b, Tensor? cu_seqlens, float? scale) -> "
         "Tensor");
  define(
      m,
      "_scores_diagonal(Tensor q, Tensor k, Tensor b, Tensor? cu_seqlens, float? scale) -> Tensor");
  define(m,
         "_output(Tensor q, Tensor v, Tensor b, Tensor A, Tensor A_diagonal, Tensor S, Tensor? "
         "cu_seqlens, float? scale) -> Tensor");
  define(m,
         "_state_grads(Tensor q, Tensor do, Tensor b, Tensor? dht, Tensor? cu_seqlens, float? "
         "scale, bool state_v_first) -> (Tensor dS, Tensor dh0)");
  define(m,
         "_value_grads(Tensor k, Tensor do, Tensor b, Tensor A, Tensor A_diagonal, Tensor dS, "
         "Tensor? cu_seqlens) -> Tensor");
  define(m, "_score_grads(Tensor do, Tensor v, Tensor? cu_seqlens, float? scale) -> Tensor");
  define(m,
         "_intra_grads(Tensor q, Tensor k, Tensor b, Tensor dA, Tensor? cu_seqlens) -> (Tensor dq, "
         "Tensor dk, Tensor dg)");
  define(m,
         "_merge_grads(Tensor q, Tensor k, Tensor v, Tensor do, Tensor b, Tensor S, Tensor dS, "
         "Tensor dq, Tensor dk, Tensor dg, Tensor? cu_seqlens, float? scale) -> (Tensor dq, Tensor "
         "dk, Tensor dg)");
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { StepsOn<Traced>::register_in(m); }

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  without_gradient<kInstead>(
      m, {"_gate_cumsum", "_chunk_states", "_scores_off_diagonal", "_scores_diagonal", "_output",
          "_state_grads", "_value_grads", "_score_grads", "_intra_grads", "_merge_grads"});
}

}  // namespace gla_ext
