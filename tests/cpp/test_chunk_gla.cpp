// gla_ext::chunk_gla against the recurrence, in fp64: outputs, and gradients through autograd.
#include <ATen/ATen.h>
#include <gla_ext/ops.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr double kTolerance = 1e-10;  // relative to the largest expected element
int failures = 0;

struct Inputs {
  at::Tensor q, k, v, g, h0;  // [B, T, H, K], .., [B, T, H, V], .., [N, H, K, V]

  std::vector<at::Tensor> all() const { return {q, k, v, g, h0}; }
};

struct Outputs {
  at::Tensor o, final_state;
};

at::Tensor leaf(at::IntArrayRef shape) {
  return at::randn(shape, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
}

Inputs make_inputs(int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, int64_t N) {
  const at::Tensor logits = at::randn({B, T, H, K}, at::TensorOptions().dtype(at::kDouble));
  return {leaf({B, T, H, K}), leaf({B, T, H, K}), leaf({B, T, H, V}),
          at::log_sigmoid(logits).requires_grad_(), leaf({N, H, K, V})};
}

// S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ, o_t = scale S_tᵀ q_t, for one [T, H, D] sequence.
Outputs recurrence(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& g, const at::Tensor& h0, double scale) {
  at::Tensor S = h0;  // [H, K, V]
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < q.size(0); ++t) {
    S = g[t].exp().unsqueeze(-1) * S + k[t].unsqueeze(-1) * v[t].unsqueeze(-2);
    rows.push_back(scale * (q[t].unsqueeze(-1) * S).sum(-2));
  }
  return {rows.empty() ? at::zeros_like(v) : at::stack(rows), S};
}

// Of sequences between offsets into all tokens of the batch.
Outputs expected(const Inputs& x, const std::vector<int64_t>& offsets, double scale) {
  std::vector<at::Tensor> o, states;
  for (size_t n = 0; n + 1 < offsets.size(); ++n) {
    const auto rows = [&](const at::Tensor& t) {
      return t.flatten(0, 1).slice(0, offsets[n], offsets[n + 1]);
    };
    const Outputs y = recurrence(rows(x.q), rows(x.k), rows(x.v), rows(x.g),
                                 x.h0[static_cast<int64_t>(n)], scale);
    o.push_back(y.o);
    states.push_back(y.final_state);
  }
  return {at::cat(o).view_as(x.v), at::stack(states)};
}

void check_close(const std::string& name, const at::Tensor& actual, const at::Tensor& expected) {
  if (!actual.defined() || actual.sizes() != expected.sizes()) {
    std::printf("FAILED  %s: no tensor of the expected shape\n", name.c_str());
    ++failures;
    return;
  }
  const double error = (actual - expected).abs().max().item<double>();
  const double bound = kTolerance * (1 + expected.abs().max().item<double>());
  const bool ok = error <= bound;  // false for NaN
  std::printf("%s  %s: error %.1e, bound %.1e\n", ok ? "ok    " : "FAILED", name.c_str(), error,
              bound);
  failures += !ok;
}

void compare(const std::string& name, const Inputs& x, const Outputs& actual,
             const Outputs& expected) {
  check_close(name + " o", actual.o, expected.o);
  check_close(name + " final_state", actual.final_state, expected.final_state);
  const at::Tensor d_o = at::randn_like(expected.o);
  const at::Tensor d_state = at::randn_like(expected.final_state);
  const auto grads = [&](const Outputs& y) {
    return torch::autograd::grad({y.o, y.final_state}, x.all(), {d_o, d_state});
  };
  const auto got = grads(actual);
  const auto want = grads(expected);
  const std::vector<std::string> names = {"dq", "dk", "dv", "dg", "dh0"};
  for (size_t i = 0; i < names.size(); ++i) check_close(name + " " + names[i], got[i], want[i]);
}

void test_dense() {
  const Inputs x = make_inputs(2, 130, 2, 20, 12, 2);
  const auto [o, state] = gla_ext::chunk_gla(x.q, x.k, x.v, x.g, std::nullopt, x.h0, true);
  compare("dense", x, {o, state.value()}, expected(x, {0, 130, 260}, 1 / std::sqrt(20.0)));
}

void test_state_v_first() {
  const Inputs x = make_inputs(1, 65, 3, 8, 16, 1);
  const auto [o, state] =
      gla_ext::chunk_gla(x.q, x.k, x.v, x.g, 0.3, x.h0.transpose(-1, -2), true, true);
  compare("v-first", x, {o, state.value().transpose(-1, -2)}, expected(x, {0, 65}, 0.3));
}

void test_packed() {
  const std::vector<int64_t> offsets = {0, 70, 70, 71, 140};  // the second sequence is empty
  const Inputs x = make_inputs(1, offsets.back(), 2, 16, 16, 4);
  const auto [o, state] = gla_ext::chunk_gla(x.q, x.k, x.v, x.g, 0.25, x.h0, true, false,
                                             at::tensor(offsets, at::kLong));
  compare("packed", x, {o, state.value()}, expected(x, offsets, 0.25));
}

void test_error() {
  const Inputs x = make_inputs(1, 4, 1, 8, 8, 1);
  try {
    gla_ext::chunk_gla(x.q, x.k.slice(1, 0, 3), x.v, x.g);
    std::printf("FAILED  a k of the wrong shape was accepted\n");
    ++failures;
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    const bool ok = text.find("expected k to have shape") != std::string::npos;
    std::printf("%s  error text: %s\n", ok ? "ok    " : "FAILED", text.c_str());
    failures += !ok;
  }
}

}  // namespace

int main() {
  at::manual_seed(0);
  test_dense();
  test_state_v_first();
  test_packed();
  test_error();
  return failures == 0 ? 0 : 1;
}
