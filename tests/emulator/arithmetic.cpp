// Sums, products and functions of numbers.
#include <algorithm>
#include <cfenv>
#include <cmath>

#include "lanes.h"
#include "numbers.h"

namespace emulator {
namespace {

struct Add {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(Wrapping<T>(a) + Wrapping<T>(b));
  }
};
struct Subtract {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(Wrapping<T>(a) - Wrapping<T>(b));
  }
};
struct Multiply {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    else
      return a * b;
  }
};
struct MultiplyHigh {
  template <class T>
  static T of(T a, T b) {
    using Wide =
        std::conditional_t<sizeof(T) == 8,
                           std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                           std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (8 * sizeof(T)));
  }
};
struct MultiplyAdd {
  template <class T>
  static T of(T a, T b, T c) {
    if constexpr (std::is_integral_v<T>)
      return Add::of(Multiply::of(a, b), c);
    else
      return std::fma(a, b, c);
  }
};
// In 64 bits, of which an instruction keeps twice as many as its type has.
template <class T>
struct MultiplyWide {
  static auto of(T a, T b) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<Wide>(a) * static_cast<Wide>(b);
  }
};
struct Divide {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      if (b == 0) return static_cast<T>(-1);
      if constexpr (std::is_signed_v<T>)
        if (b == -1) return static_cast<T>(-static_cast<Wrapping<T>>(a));
    }
    return a / b;
  }
};
struct Remainder {
  template <class T>
  static T of(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return 0;
    return a % b;
  }
};
// Of a number and a NaN the number.
template <bool kMax>
struct Extreme {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return kMax ? std::fmax(a, b) : std::fmin(a, b);
    else
      return kMax ? std::max(a, b) : std::min(a, b);
  }
};
struct MaxOfBf16Pairs {  // NaN wins
  static uint16_t one(uint16_t a, uint16_t b) {
    const float x = bf16_to_float(a), y = bf16_to_float(b);
    if (std::isnan(x) || std::isnan(y)) return 0x7fff;
    return x > y || (x == y && !std::signbit(x)) ? a : b;
  }
  static uint32_t of(uint32_t a, uint32_t b) {
    return one(static_cast<uint16_t>(a), static_cast<uint16_t>(b)) |
           uint32_t{one(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16))} << 16;
  }
};
struct Absolute {
  template <class T>
  static T of(T a) {
    if constexpr (std::is_floating_point_v<T>)
      return std::abs(a);
    else
      return a < 0 ? static_cast<T>(-Wrapping<T>(a)) : a;
  }
};
struct Negative {
  template <class T>
  static T of(T a) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(-Wrapping<T>(a));
    else
      return -a;
  }
};
struct PowerOfTwo {
  static float of(float a) { return flush(std::exp2(flush(a))); }
};
struct CopySign {
  static float of(float sign, float a) { return std::copysign(a, sign); }
};
struct Log2 {
  static float of(float a) { return std::log2(flush(a)); }
};
struct Reciprocal {
  static float of(float a) { return 1.f / a; }
};
struct FlushedReciprocal {
  static float of(float a) { return flush(1.f / flush(a)); }
};
// fp32 rounded another way than to the nearest; volatile, since the compiler knows one way alone.
template <int kRounding, class F>
struct Rounded {
  template <class... A>
  static float of(A... a) {
    std::fesetround(kRounding);
    const float r = in_order(a...);
    std::fesetround(FE_TONEAREST);
    return r;
  }

 private:
  template <class... A>
  static float in_order(volatile A... a) {
    volatile const float r = F::of(static_cast<float>(a)...);
    return r;
  }
};
struct ReciprocalRoot {
  static float of(float a) { return static_cast<float>(1 / std::sqrt(static_cast<double>(a))); }
};

template <class F>
Execute two(const std::string& type) {
  return type == "f32" ? map<F, float, float, float> : two_integers<F>(type);
}

}  // namespace

Execute decode_arithmetic(const Words& words, Instruction&) {
  const std::string &op = words[0], &type = words.back();
  if (op == "fma" && type == "f32" && has(words, "rm"))
    return map<Rounded<FE_DOWNWARD, MultiplyAdd>, float, float, float, float>;
  if (op == "add" && type == "f32" && has(words, "rz"))
    return map<Rounded<FE_TOWARDZERO, Add>, float, float, float>;
  for (const char* other : {"rm", "rp", "rz", "sat"})
    if (has(words, other)) return nullptr;
  if (op == "add") return two<Add>(type);
  if (op == "sub") return two<Subtract>(type);
  if (op == "mul") {
    if (has(words, "wide"))
      return type == "s32"   ? map<MultiplyWide<int32_t>, int64_t, int32_t, int32_t>
             : type == "u32" ? map<MultiplyWide<uint32_t>, uint64_t, uint32_t, uint32_t>
             : type == "s16" ? map<MultiplyWide<int16_t>, int32_t, int16_t, int16_t>
             : type == "u16" ? map<MultiplyWide<uint16_t>, uint32_t, uint16_t, uint16_t>
                             : nullptr;
    return has(words, "hi") ? two_integers<MultiplyHigh>(type) : two<Multiply>(type);
  }
  if (op == "mad" && has(words, "lo")) {
    if (type == "s32" || type == "u32")
      return map<MultiplyAdd, uint32_t, uint32_t, uint32_t, uint32_t>;
    if (type == "s64" || type == "u64")
      return map<MultiplyAdd, uint64_t, uint64_t, uint64_t, uint64_t>;
  }
  if (op == "fma" && type == "f32") return map<MultiplyAdd, float, float, float, float>;
  if (op == "div") return two<Divide>(type);
  if (op == "rem") return two_integers<Remainder>(type);
  if (op == "min") return two<Extreme<false>>(type);
  if (op == "max")
    return type == "bf16x2" ? map<MaxOfBf16Pairs, uint32_t, uint32_t, uint32_t>
                            : two<Extreme<true>>(type);
  if (op == "abs")
    return type == "f32"   ? map<Absolute, float, float>
           : type == "s32" ? map<Absolute, int32_t, int32_t>
           : type == "s64" ? map<Absolute, int64_t, int64_t>
                           : nullptr;
  if (op == "neg") return type == "f32" ? map<Negative, float, float> : one_integer<Negative>(type);
  if (type == "f32") {
    if (op == "ex2") return map<PowerOfTwo, float, float>;
    if (op == "copysign") return map<CopySign, float, float, float>;
    if (op == "lg2") return map<Log2, float, float>;
    if (op == "rcp" && has(words, "ftz")) return map<FlushedReciprocal, float, float>;
    if (op == "rcp") return map<Reciprocal, float, float>;
    if (op == "rsqrt") return map<ReciprocalRoot, float, float>;
  }
  return nullptr;
}

}  // namespace emulator
