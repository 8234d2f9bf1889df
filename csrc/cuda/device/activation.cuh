// The gate's activation f and its slope f'.
#pragma once

#include "common/activation.h"
#include "cuda/device/gates.cuh"

namespace gla_ext::cuda {

// Accurate to fp32 if T is float. For shorter types it takes two instructions, whose error of about
// 2^-22 is far below the rounding of T.
template <class T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return 1.f / (1.f + expf(-x));
  } else {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + exp2_ftz(x * -kLog2E)));
    return r;
  }
}

// Calls body(function), where function(x, f, f') computes the activation. The compiler drops f'
// where it is not read. NaN stays NaN.
template <class T, class Body>
__device__ __forceinline__ void with_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kRelu:
      return body([](float x, float& f, float& df) {
        f = x < 0.f ? 0.f : x;
        df = x <= 0.f ? 0.f : 1.f;
      });
    case Activation::kSquaredRelu:
      return body([](float x, float& f, float& df) {
        const float r = x < 0.f ? 0.f : x;
        f = r * r;
        df = 2.f * r;
      });
    case Activation::kSigmoid:
      return body([](float x, float& f, float& df) {
        f = sigmoid<T>(x);
        df = f * (1.f - f);
      });
    case Activation::kLogSigmoid:
      return body([](float x, float& f, float& df) {
        f = fminf(x, 0.f) - log1pf(expf(-fabsf(x)));
        df = sigmoid<T>(-x);
      });
    case Activation::kGelu:
      return body([](float x, float& f, float& df) {
        constexpr auto kSlope = static_cast<float>(kGeluSlope);
        constexpr auto kCube = static_cast<float>(kGeluCube);
        const float s = sigmoid<T>(kSlope * x * (1.f + kCube * x * x));
        f = x * s;
        df = s + f * (1.f - s) * kSlope * (1.f + 3.f * kCube * x * x);
      });
    case Activation::kSwish:
      return body([](float x, float& f, float& df) {
        const float s = sigmoid<T>(x);
        f = x * s;
        df = fmaf(f, 1.f - s, s);
      });
  }
}

}  // namespace gla_ext::cuda
