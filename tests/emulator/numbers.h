// Conversions between fp32 and what is shorter, as the GPU rounds.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace emulator {

inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float f16_to_float(uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }
inline uint16_t float_to_f16(float x) {
  return std::isnan(x) ? 0x7fff : std::bit_cast<uint16_t>(static_cast<_Float16>(x));
}
// Ties away from zero.
inline float to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000) & ~0x1fffu);
}
inline float flush(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x;
}

}  // namespace emulator
