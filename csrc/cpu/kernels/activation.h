// The activations of gates, and their slopes.
#pragma once

#include "common/activation.h"
#include "tile.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
struct Activated {
  Vec<T> value, slope;
};

// Computes f and f' of an activation.
template <typename T>
inline Activated<T> activated(Activation activation, const Vec<T>& g) {
  const Vec<T> zero(T(0)), one(T(1)), two(T(2));
  const auto sigmoid = [&](const Vec<T>& x) { return one / (one + x.neg().exp()); };
  switch (activation) {
    case Activation::kRelu:
      return {Vec<T>::blendv(g, zero, g < zero), Vec<T>::blendv(one, zero, g <= zero)};
    case Activation::kSquaredRelu: {
      const Vec<T> r = Vec<T>::blendv(g, zero, g < zero);
      return {r * r, two * r};
    }
    case Activation::kSigmoid: {
      const Vec<T> s = sigmoid(g);
      return {s, s * (one - s)};
    }
    case Activation::kLogSigmoid:
      return {at::vec::minimum(g, zero) - g.abs().neg().exp().log1p(), sigmoid(g.neg())};
    case Activation::kGelu: {
      const Vec<T> slope{T(kGeluSlope)}, cube{T(kGeluCube)};
      const Vec<T> s = sigmoid(slope * g * (one + cube * g * g));
      return {g * s, s + g * s * (one - s) * slope * (one + Vec<T>(T(3)) * cube * g * g)};
    }
    case Activation::kSwish:
      break;
  }
  const Vec<T> below = one + g.neg().exp(), s = one / below;
  const Vec<T> value = g / below;  // not g s, which rounds once more
  return {value, at::vec::fmadd(value, one - s, s)};
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
