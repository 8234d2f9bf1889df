// From one type to another, and as it is.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.h"
#include "numbers.h"

namespace emulator {
namespace {

struct Move {
  template <class T>
  static T of(T a) {
    return a;
  }
};
struct FromShared {
  static uint64_t of(uint64_t a) { return a + kSharedWindow; }
};
struct Saturate {
  static float of(float a) { return a > 0 ? std::min(a, 1.f) : 0.f; }
};
template <class D>
struct Convert {
  template <class S>
  static D of(S a) {
    return static_cast<D>(a);
  }
};
template <class D, float (*kHow)(float)>
struct Round {  // to a whole fp32, or to an integer, the nearest there is, where NaN is 0
  static D of(float a) {
    const float x = kHow(a);
    if constexpr (std::is_same_v<D, float>) return x;
    if (std::isnan(x)) return 0;
    if (x <= static_cast<float>(std::numeric_limits<D>::min()))
      return std::numeric_limits<D>::min();
    if (x >= static_cast<float>(std::numeric_limits<D>::max()))
      return std::numeric_limits<D>::max();
    return static_cast<D>(x);
  }
};
float to_nearest(float x) { return std::nearbyint(x); }
float to_zero(float x) { return std::trunc(x); }
float downward(float x) { return std::floor(x); }
float upward(float x) { return std::ceil(x); }
// By a function of numbers.h.
template <auto kConvert>
struct By {
  template <class S>
  static auto of(S a) {
    return kConvert(a);
  }
};
template <uint16_t (*kConvert)(float)>
struct PairBy {
  static uint32_t of(float high, float low) {
    return uint32_t{kConvert(high)} << 16 | kConvert(low);
  }
};

// The low bits of a register that is wider than the type.
template <class D, class S>
struct ConvertLow {
  static D of(uint64_t a) { return static_cast<D>(static_cast<S>(a)); }
};

template <class D, class S>
Execute convert_from(const Instruction& i) {
  return i.operands[1].wide ? map<ConvertLow<D, S>, D, uint64_t> : map<Convert<D>, D, S>;
}
template <class D>
Execute convert_integer(const std::string& from, const Instruction& i) {
  if (from == "s8") return convert_from<D, int8_t>(i);
  if (from == "u8") return convert_from<D, uint8_t>(i);
  return for_integer(from, [&]<class S>(S) -> Execute {
    if constexpr (sizeof(S) == 8)
      return map<Convert<D>, D, S>;
    else
      return convert_from<D, S>(i);
  });
}
template <class D>
Execute round_to(const Words& words) {
  if (has(words, "rni")) return map<Round<D, to_nearest>, D, float>;
  if (has(words, "rzi")) return map<Round<D, to_zero>, D, float>;
  if (has(words, "rmi")) return map<Round<D, downward>, D, float>;
  if (has(words, "rpi")) return map<Round<D, upward>, D, float>;
  return nullptr;
}
Execute conversion(const Words& words, const Instruction& i) {
  const std::string &to = words[words.size() - 2], &from = words.back();
  if (from == "bf16") return to == "f32" ? map<By<bf16_to_float>, float, uint16_t> : nullptr;
  if (from == "f16") return to == "f32" ? map<By<f16_to_float>, float, uint16_t> : nullptr;
  if (from == "f32") {
    if (to == "bf16x2") return map<PairBy<float_to_bf16>, uint32_t, float, float>;
    if (to == "f16x2") return map<PairBy<float_to_f16>, uint32_t, float, float>;
    if (to == "bf16") return map<By<float_to_bf16>, uint16_t, float>;
    if (to == "f16") return map<By<float_to_f16>, uint16_t, float>;
    if (to == "tf32") return map<By<to_tf32>, float, float>;
    if (to == "f32" && has(words, "sat")) return map<Saturate, float, float>;
    if (to == "f32") return round_to<float>(words);
    if (to == "s32") return round_to<int32_t>(words);
    if (to == "u32") return round_to<uint32_t>(words);
    if (to == "s64") return round_to<int64_t>(words);
    return nullptr;
  }
  if (to == "s16" || to == "s8") return convert_integer<int16_t>(from, i);
  if (to == "u16" || to == "u8") return convert_integer<uint16_t>(from, i);
  if (to == "s32") return convert_integer<int32_t>(from, i);
  if (to == "u32") return convert_integer<uint32_t>(from, i);
  if (to == "s64") return convert_integer<int64_t>(from, i);
  if (to == "u64") return convert_integer<uint64_t>(from, i);
  if (to == "f32") return convert_integer<float>(from, i);
  return nullptr;
}

// Two halves to one register, and back.
template <class Whole, class Half>
Outcome join_halves(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const Whole low = static_cast<Half>(w.lanes<uint32_t>(i.operands[1])[lane]);
    const Whole high = static_cast<Half>(w.lanes<uint32_t>(i.operands[2])[lane]);
    w.lanes<Lane<Whole>>(i.operands[0])[lane] =
        static_cast<Whole>(high << (8 * sizeof(Half)) | low);
  });
  return Outcome::kNext;
}
template <class Whole, class Half>
Outcome split_halves(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const Whole x = w.lanes<Lane<Whole>>(i.operands[2])[lane];
    for (int half = 0; half < 2; ++half)
      if (i.operands[half].kind != Operand::kNone)
        w.lanes<uint32_t>(i.operands[half])[lane] =
            static_cast<Half>(x >> (8 * sizeof(Half) * half));
  });
  return Outcome::kNext;
}
Execute move(const Words& words, const Instruction& i) {
  const bool wide = words.back().ends_with("64");
  if (i.count == 2) {
    if (splits(i))
      return wide ? split_halves<uint64_t, uint32_t> : split_halves<uint32_t, uint16_t>;
    return wide ? join_halves<uint64_t, uint32_t> : join_halves<uint32_t, uint16_t>;
  }
  return wide ? map<Move, uint64_t, uint64_t> : map<Move, uint32_t, uint32_t>;
}

}  // namespace

Execute decode_conversion(const Words& words, Instruction& i) {
  if (words[0] == "cvt") return conversion(words, i);
  if (words[0] == "mov" && words.back() != "pred") return move(words, i);
  if (words[0] == "cvta") {
    if (has(words, "global")) return map<Move, uint64_t, uint64_t>;  // the same address
    if (words[1] == "shared") return map<FromShared, uint64_t, uint64_t>;
  }
  return nullptr;
}

}  // namespace emulator
