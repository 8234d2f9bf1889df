// Bits of a register, and where they go.
#include "lanes.h"

namespace emulator {
namespace {

struct Not {
  template <class T>
  static T of(T a) {
    return static_cast<T>(~a);
  }
};
struct ShiftLeft {
  template <class T>
  static T of(T a, uint32_t by) {
    return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(Wrapping<T>(a) << by);
  }
};
struct ShiftRight {
  template <class T>
  static T of(T a, uint32_t by) {
    const uint32_t most = 8 * sizeof(T) - 1;
    if (by > most) return std::is_signed_v<T> ? static_cast<T>(a >> most) : T{0};
    return static_cast<T>(a >> by);
  }
};
struct InsertBits {
  static uint32_t of(uint32_t a, uint32_t b, uint32_t at, uint32_t count) {
    at &= 0xff;
    count &= 0xff;
    if (at >= 32 || count == 0) return b;
    const uint32_t mask = (count >= 32 ? 0xffffffffu : (1u << count) - 1) << at;
    return (b & ~mask) | (a << at & mask);
  }
};
struct MaskOfBits {
  static uint32_t of(uint32_t first, uint32_t count) {
    if (first >= 32) return 0;
    return (count >= 32 ? 0xffffffffu : (1u << count) - 1) << first;
  }
};
struct ReverseBits {
  static uint32_t of(uint32_t a) {
    uint32_t r = 0;
    for (int n = 0; n < 32; ++n) r |= (a >> n & 1) << (31 - n);
    return r;
  }
};
struct ShiftToFirstBit {
  static uint32_t of(uint32_t a) {
    return a == 0 ? 0xffffffffu : static_cast<uint32_t>(std::countl_zero(a));
  }
};
struct Permute {
  static uint32_t of(uint32_t a, uint32_t b, uint32_t selection) {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    uint32_t r = 0;
    for (int n = 0; n < 4; ++n) {
      const uint32_t s = selection >> (4 * n) & 0xf;
      uint32_t byte = bytes >> (8 * (s & 7)) & 0xff;
      if (s & 8) byte = byte & 0x80 ? 0xff : 0;
      r |= byte << (8 * n);
    }
    return r;
  }
};
template <class F>
Execute shift(const std::string& type) {
  return for_integer(type, []<class T>(T) -> Execute { return map<F, T, T, uint32_t>; });
}

}  // namespace

Execute decode_bits(const Words& words, Instruction&) {
  const std::string &op = words[0], &type = words.back();
  if (type == "pred") return nullptr;
  if (op == "and") return two_integers<Plain<std::bit_and<>>>(type);
  if (op == "or") return two_integers<Plain<std::bit_or<>>>(type);
  if (op == "xor") return two_integers<Plain<std::bit_xor<>>>(type);
  if (op == "not") return one_integer<Not>(type);
  if (op == "shl") return shift<ShiftLeft>(type);
  if (op == "shr") return shift<ShiftRight>(type);
  if (op == "bfi" && type == "b32")
    return map<InsertBits, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;
  if (op == "bmsk" && has(words, "clamp") && type == "b32")
    return map<MaskOfBits, uint32_t, uint32_t, uint32_t>;
  if (op == "brev" && type == "b32") return map<ReverseBits, uint32_t, uint32_t>;
  if (op == "bfind" && has(words, "shiftamt") && type == "u32")
    return map<ShiftToFirstBit, uint32_t, uint32_t>;
  if (op == "prmt") return map<Permute, uint32_t, uint32_t, uint32_t, uint32_t>;
  return nullptr;
}

}  // namespace emulator
