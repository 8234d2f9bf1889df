// Values of registers, lane by lane, and what instructions of one value a lane share.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

namespace emulator {

// How a value lies in a register: types of less than 4 bytes in 4.
template <class T>
using Lane = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
T from_lane(Lane<T> x) {
  if constexpr (sizeof(T) >= 4)
    return std::bit_cast<T>(x);
  else if constexpr (sizeof(T) == 2)
    return std::bit_cast<T>(static_cast<uint16_t>(x));
  else
    return std::bit_cast<T>(static_cast<uint8_t>(x));
}
template <class T>
Lane<T> to_lane(T x) {
  if constexpr (sizeof(T) >= 4)
    return std::bit_cast<Lane<T>>(x);
  else if constexpr (sizeof(T) == 2)
    return std::bit_cast<uint16_t>(x);
  else
    return std::bit_cast<uint8_t>(x);
}

template <class L>
void keep(L* to, const L (&values)[kLanes], uint32_t lanes) {
  if (lanes == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = values[lane];
  } else {
    for (int lane = 0; lane < kLanes; ++lane)
      if (lanes >> lane & 1) to[lane] = values[lane];
  }
}

// d = F(a, b, ...), of these types.
template <class F, class R, class... A>
Outcome map(Warp& w, const Instruction& i, uint32_t lanes) {
  constexpr bool kWide[] = {sizeof(R) == 8, sizeof(A) == 8 ...};
  for (size_t n = 0; n < std::size(kWide); ++n)
    if (i.operands[n].wide != kWide[n]) w.fail("the emulator takes another width of an operand");
  Lane<R> r[kLanes];
  [&]<size_t... n>(std::index_sequence<n...>) {
    const auto run = [&](const Lane<A>*... in) {
      for (int lane = 0; lane < kLanes; ++lane)
        r[lane] = to_lane<R>(static_cast<R>(F::of(from_lane<A>(in[lane])...)));
    };
    run(w.lanes<Lane<A>>(i.operands[n + 1])...);
  }(std::index_sequence_for<A...>());
  keep(w.lanes<Lane<R>>(i.operands[0]), r, lanes);
  return Outcome::kNext;
}

// choose(T{}) of the integer type T that PTX calls so.
template <class Choose>
Execute for_integer(const std::string& type, Choose choose) {
  if (type == "s16") return choose(int16_t{});
  if (type == "u16" || type == "b16") return choose(uint16_t{});
  if (type == "s32") return choose(int32_t{});
  if (type == "u32" || type == "b32") return choose(uint32_t{});
  if (type == "s64") return choose(int64_t{});
  if (type == "u64" || type == "b64") return choose(uint64_t{});
  return nullptr;
}
template <class F>
Execute two_integers(const std::string& type) {
  return for_integer(type, []<class T>(T) -> Execute { return map<F, T, T, T>; });
}
template <class F>
Execute one_integer(const std::string& type) {
  return for_integer(type, []<class T>(T) -> Execute { return map<F, T, T>; });
}
// An operator of two values, such as std::less<>.
template <class Operator>
struct Plain {
  template <class T>
  static auto of(T a, T b) {
    return Operator{}(a, b);
  }
};
// Integers wrap around.
template <class T>
using Wrapping =
    std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

template <class Function>
void for_lanes(uint32_t lanes, Function function) {
  for (; lanes != 0; lanes &= lanes - 1) function(std::countr_zero(lanes));
}

// Of instructions that run too seldom to have their types compiled in.
inline uint64_t value(Warp& w, const Operand& x, int lane) {
  return x.wide ? w.lanes<uint64_t>(x)[lane] : w.lanes<uint32_t>(x)[lane];
}
inline uint64_t address_of(Warp& w, const Instruction& i, size_t operand, int lane) {
  return value(w, i.operands[operand], lane) + static_cast<uint64_t>(i.offset);
}
// The same for all lanes, as instructions of a warp want it.
inline uint64_t uniform(Warp& w, const Operand& x, uint32_t lanes) {
  const uint64_t first = value(w, x, std::countr_zero(lanes));
  for_lanes(lanes, [&](int lane) {
    if (value(w, x, lane) != first) w.fail("an operand differs between lanes");
  });
  return first;
}

inline Outcome nothing(Warp&, const Instruction&, uint32_t) { return Outcome::kNext; }

using Words = std::vector<std::string>;  // of an opcode, such as "add", "s32"

inline bool has(const Words& words, std::string_view word) {
  for (const std::string& w : words)
    if (w == word) return true;
  return false;
}

// What runs an instruction, by its opcode; sets what that needs of the instruction. nullptr: the
// emulator does not know it.
Execute decode(const Words& words, Instruction& i);
// Each knows some opcodes.
Execute decode_arithmetic(const Words& words, Instruction& i);
Execute decode_bits(const Words& words, Instruction& i);
Execute decode_predicate(const Words& words, Instruction& i);
Execute decode_conversion(const Words& words, Instruction& i);
Execute decode_memory(const Words& words, Instruction& i);
Execute decode_copy(const Words& words, Instruction& i);
Execute decode_sync(const Words& words, Instruction& i);
Execute decode_product(const Words& words, Instruction& i);

}  // namespace emulator
