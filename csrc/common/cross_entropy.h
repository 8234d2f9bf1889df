// The options that kernels of cross entropy share on every backend: plain, no torch header.
#pragma once

#include <cstdint>

namespace gla_ext {

// The loss of a row of V logits x with label y, where s = cap tanh(scale x / cap), or scale x:
//   lse - (1 - smoothing) s_y - smoothing mean(s) + square lse²      lse = log sum(exp s)
// and 0 if y is `ignored`.
struct CrossEntropyOptions {
  int64_t ignored = -100;
  double smoothing = 0;
  double scale = 1;
  double cap = 0;  // 0: none
  double square = 0;
};

}  // namespace gla_ext
