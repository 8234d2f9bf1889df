// One token: the state is k vᵀ, so o = scale (q · k) v.
#include <ATen/ATen.h>
#include <gla_ext/ops.h>

#include <cstdio>

int main() {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor q = at::randn({2, 1, 3, 8}, options);
  const at::Tensor k = at::randn({2, 1, 3, 8}, options);
  const at::Tensor v = at::randn({2, 1, 3, 5}, options);
  const at::Tensor g = -at::rand({2, 1, 3, 8}, options);
  const auto [o, final_state] = gla_ext::chunk_gla(q, k, v, g, 0.5);

  const at::Tensor expected = 0.5 * (q * k).sum(-1, true) * v;
  const double error = (o - expected).abs().max().item<double>();
  std::printf("consumer: largest error %.1e\n", error);
  return error < 1e-12 && !final_state.has_value() ? 0 : 1;
}
