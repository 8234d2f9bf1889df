// The steps of csrc/README.md as operators; forward 1 and 2 are backward 1 and 2.
#include "op.h"

#include <algorithm>

#include "dispatch/checker.h"
#include "dispatch/in_place.h"
#include "dispatch/meta.h"

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

bool has_keys(const std::vector<StepTensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const StepTensor& x) { return x.last == 'K'; });
}

}  // namespace

const at::Tensor& StepInputs::first() const { return *step_tensors(*this).front().t; }

Shape check_step(const StepInputs& in) {
  const std::vector<StepTensor> tensors = step_tensors(in);
  const StepTensor& first = tensors.front();
  TORCH_CHECK_TYPE(in.scale.has_value() || has_keys(tensors), in.op,
                   ": expected scale to be a float (its default, K ** -0.5, needs K), got None");
  const Checker check(in.op, first.name, *first.t);
  for (const StepTensor& x : tensors) check.defined(x.name, *x.t);
  for (const StepTensor& x : tensors) {
    check.strided(x.name, *x.t);
    check.device(x.name, *x.t);
  }
  check.floating(first.name, *first.t);
  Shape shape;
  shape.dtype = first.t->scalar_type();
  shape.accumulate = accumulate_of(*first.t);
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

  at::Tensor run(GateCumsum) const { return rows(s.K); }
  TwoTensors run(ChunkStates) const { return states(); }
  at::Tensor run(ScoresOffDiagonal) const { return rows(kChunk); }
  at::Tensor run(ScoresDiagonal) const { return rows(kSubChunk); }
  at::Tensor run(Output) const { return fresh(*in.v); }
  TwoTensors run(StateGrads) const { return states(); }
  at::Tensor run(ValueGrads) const { return fresh(*in.d_o); }
  at::Tensor run(ScoreGrads) const { return rows(kChunk); }
  ThreeTensors run(IntraGrads) const { return {rows(s.K), rows(s.K), rows(s.K)}; }
  ThreeTensors run(MergeGrads) const { return {fresh(*in.q), fresh(*in.k), rows(s.K)}; }
};

struct Traced {
  template <class Operator>
  static auto run(const StepInputs& in, Operator step) {
    return TracedStep{in, check_step(in)}.run(step);
  }
};

constexpr char kInstead[] =
    "it has no gradient of its own, call gla_ext.chunk_gla, or this under torch.no_grad()";

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  for_each_step([&](auto step) {
    define_without_gradient<kInstead>(m, std::string(step.name) + step.schema);
  });
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { register_steps<Traced>(m); }

}  // namespace gla_ext
