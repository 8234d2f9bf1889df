#include "dispatch/in_place.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"
#include "low_rank_step.h"
#include "op.h"

namespace gla_ext {

Shape check_low_rank_step(const LowRankStep& a) {
  const char* op = "recurrent_gla_low_rank_step_";
  const Shape shape =
      check_pool({op, &a.q, &a.k, &a.v, &kAbsent, &kAbsent}, {a.state, a.slots, a.state_v_first});
  const Checker check(op, "q", a.q);
  TORCH_CHECK_VALUE(holds(shape.T.sym_eq(1)), op, ": expected one token a row, got T = ", shape.T);
  const c10::SymInt keys = a.k.sym_size(2) * shape.K;
  check.like("h", a.h);
  check.rank("h", a.h, 3, "[B, 1, R]");
  const c10::SymInt R = a.h.sym_size(2);
  check.shape("h", a.h, "[B, 1, R]", {shape.B, shape.T, R});
  check.at_least_one("the last dimension", "h", R);
  check.like("gate_weight", a.gate_weight);
  check.shape("gate_weight", a.gate_weight, "[HK * K, R]", {keys, R});
  if (given(a.gate_bias)) {
    check.like("gate_bias", *a.gate_bias);
    check.shape("gate_bias", *a.gate_bias, "[HK * K]", {keys});
  }
  TORCH_CHECK_VALUE(a.normalizer > 0, op, ": expected normalizer to be above 0, got ",
                    a.normalizer);
  return shape;
}

at::Tensor composed_low_rank_step(const LowRankStep& a) {
  check_low_rank_step(a);
  const at::Tensor gk =
      gate_projection_fwd(a.h, a.gate_weight, a.gate_bias, a.normalizer, a.clamp_min)
          .unflatten(-1, {a.k.size(2), a.k.size(3)});
  return recurrent_gla_step_(a.q, a.k, a.v, gk, {}, a.state, a.slots, a.scale, a.state_v_first);
}

namespace {

at::Tensor dispatch(const LowRankStep& a) {
  static const Op<decltype(positional<dispatch>)> op("gla_ext::recurrent_gla_low_rank_step_");
  return op(a.q, a.k, a.v, a.h, a.gate_weight, a.gate_bias, a.normalizer, a.clamp_min, a.state,
            a.slots, a.scale, a.state_v_first, a.overlaps);
}

at::Tensor meta(const LowRankStep& a) { return fresh_output(check_low_rank_step(a), a.v); }

constexpr Refusal kRefusal{"recurrent_gla_low_rank_step_",
                           "decoding has no gradient, run it under torch.no_grad()"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "recurrent_gla_low_rank_step_(Tensor q, Tensor k, Tensor v, Tensor h, Tensor gate_weight, "
         "Tensor? gate_bias, float normalizer, float? clamp_min, Tensor(a!) state, Tensor? slots, "
         "float? scale, bool state_v_first, bool overlaps=False) -> Tensor");
  in_place<positional<dispatch>, kRefusal>(m, "recurrent_gla_low_rank_step_");
  refuse_vmap(m, {"recurrent_gla_low_rank_step_"});
}

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("recurrent_gla_low_rank_step_", positional<composed_low_rank_step>);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { m.impl("recurrent_gla_low_rank_step_", positional<meta>); }

}  // namespace gla_ext
