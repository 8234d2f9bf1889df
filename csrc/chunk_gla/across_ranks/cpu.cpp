// The halves of chunk_gla on the CPU, each a pass of its own, and the fold between them.
#include <cmath>

#include "cpu/host/parallel.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

template <class T>
T decayed(T x, T decay) {
  const T factor = std::exp(decay);
  return factor == 0 ? T(0) : factor * x;
}

// Computes x for one row and head.
template <class T>
void fold_matrix(const Fold<T>& p, int64_t row, int64_t head) {
  const bool entered = p.is_entered(row);
  const int64_t steps = entered ? p.reach : 0;
  for (int64_t k = 0; k < p.K; ++k) {
    for (int64_t v = 0; v < p.V; ++v) {
      const int64_t at = p.element(row, head, k, v);
      T x = !entered && p.boundary != nullptr ? p.boundary[at] : T(0);
      for (int64_t i = 0; i < steps; ++i) {
        const auto source = p.source(row, i);
        if (p.key_gated) x = decayed(x, p.decays[p.key_decay(source, head) + k]);
        if (p.value_gated) x = decayed(x, p.decays[p.value_decay(source, head) + v]);
        x += p.states[p.state(source, head) + k * p.V + v];
      }
      p.x[at] = x;
    }
  }
}

template <class T>
void fold(const Fold<T>& p) {
  at::parallel_for(0, p.rows * p.H, 1, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) fold_matrix(p, i / p.H, i % p.H);
  });
  for (int64_t i = 0; i < p.kept_elements(); ++i)
    p.kept[i] = p.decays[i / p.decays_each() * p.decay_stride + i % p.decays_each()];
}

TwoTensors chunk_gla_fold_cpu(const FoldArguments& a) {
  const halves::FoldTensors tensors(a);
  if (tensors.x.scalar_type() == at::kDouble)
    fold(tensors.problem<double>());
  else
    fold(tensors.problem<float>());
  return {tensors.x, tensors.kept};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  register_halves<halves::summary, halves::apply, halves::summary_bwd, halves::apply_bwd,
                  chunk_gla_fold_cpu>(m);
}

}  // namespace gla_ext::cpu
