// The activations of gates, for every backend: plain, no torch header.
#pragma once

#include <cstdint>

namespace gla_ext {

enum class Activation : uint8_t { kRelu, kSigmoid, kLogSigmoid, kSwish, kSquaredRelu, kGelu };

// GELU's tanh form is x sigmoid(kGeluSlope x (1 + kGeluCube x^2)) (arXiv 1606.08415).
constexpr double kGeluSlope = 1.5957691216057308;  // 2 sqrt(2 / pi)
constexpr double kGeluCube = 0.044715;

}  // namespace gla_ext
