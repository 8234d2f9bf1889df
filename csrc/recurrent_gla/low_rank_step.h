// recurrent_gla_step_ with the low-rank gate gk = max(logsigmoid(h Wᵀ + b) / normalizer,
// clamp_min), for one token per row. overlaps: the kernel may start, and read weights and states,
// before the previous kernel of the stream has ended; no kernel that may still run writes these.
#pragma once

#include "common/shape.h"

namespace gla_ext {

struct LowRankStep {
  const at::Tensor &q, &k, &v, &h, &gate_weight;
  const OptionalTensor& gate_bias;
  double normalizer;
  std::optional<double> clamp_min;
  at::Tensor& state;
  const OptionalTensor& slots;
  std::optional<double> scale;
  bool state_v_first, overlaps;
};

// Shape::N is P.
Shape check_low_rank_step(const LowRankStep& a);

// Composed of gate_projection and recurrent_gla_step_.
at::Tensor composed_low_rank_step(const LowRankStep& a);

// A kernel as the dispatcher calls it.
template <at::Tensor (*kernel)(const LowRankStep&)>
at::Tensor positional(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const at::Tensor& h, const at::Tensor& gate_weight,
                      const OptionalTensor& gate_bias, double normalizer,
                      std::optional<double> clamp_min, at::Tensor& state,
                      const OptionalTensor& slots, std::optional<double> scale, bool state_v_first,
                      bool overlaps) {
  return kernel({q, k, v, h, gate_weight, gate_bias, normalizer, clamp_min, state, slots, scale,
                 state_v_first, overlaps});
}

}  // namespace gla_ext
