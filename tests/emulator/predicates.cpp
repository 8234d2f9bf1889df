// Predicates, what is chosen by them, and branches.
#include "lanes.h"

namespace emulator {
namespace {

enum class Logic { kAnd, kOr, kXor };

template <Logic kLogic>
Outcome combine_predicates(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t a = w.read_predicate(i.operands[1]), b = w.read_predicate(i.operands[2]);
  const uint32_t both = kLogic == Logic::kAnd ? a & b : kLogic == Logic::kOr ? a | b : a ^ b;
  w.set_predicate(i.operands[0], both, lanes);
  return Outcome::kNext;
}
Outcome not_predicate(Warp& w, const Instruction& i, uint32_t lanes) {
  w.set_predicate(i.operands[0], ~w.read_predicate(i.operands[1]), lanes);
  return Outcome::kNext;
}
Outcome move_predicate(Warp& w, const Instruction& i, uint32_t lanes) {
  const Operand& x = i.operands[1];
  const uint32_t bits =
      x.kind == Operand::kConstant ? (value(w, x, 0) != 0 ? kAllLanes : 0) : w.read_predicate(x);
  w.set_predicate(i.operands[0], bits, lanes);
  return Outcome::kNext;
}

template <class T>
Outcome select(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t p = w.read_predicate(i.operands[3]);
  const Lane<T>*a = w.lanes<Lane<T>>(i.operands[1]), *b = w.lanes<Lane<T>>(i.operands[2]);
  Lane<T> r[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) r[lane] = p >> lane & 1 ? a[lane] : b[lane];
  keep(w.lanes<Lane<T>>(i.operands[0]), r, lanes);
  return Outcome::kNext;
}

using Equal = Plain<std::equal_to<>>;
using Less = Plain<std::less<>>;
using LessEqual = Plain<std::less_equal<>>;
using Greater = Plain<std::greater<>>;
using GreaterEqual = Plain<std::greater_equal<>>;
struct Unequal {  // of numbers, ordered
  template <class T>
  static bool of(T a, T b) {
    return a < b || a > b;
  }
};
// The same or unordered: not the opposite.
template <class Opposite>
struct Unless {
  template <class T>
  static bool of(T a, T b) {
    return !Opposite::of(a, b);
  }
};
struct Ordered {
  template <class T>
  static bool of(T a, T b) {
    return a == a && b == b;
  }
};

// With a third operand, and of the opposite too.
constexpr uint32_t kAnd = 1, kOr = 2, kXor = 3, kTwoResults = 4;

template <class F, class T>
Outcome compare(Warp& w, const Instruction& i, uint32_t lanes) {
  const bool two_results = (i.flags & kTwoResults) != 0;
  const size_t first = two_results ? 2 : 1;
  const Lane<T>*a = w.lanes<Lane<T>>(i.operands[first]),
        *b = w.lanes<Lane<T>>(i.operands[first + 1]);
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    bits |= uint32_t{F::of(from_lane<T>(a[lane]), from_lane<T>(b[lane]))} << lane;
  if (const uint32_t how = i.flags & ~kTwoResults; how != 0) {
    const uint32_t c = w.read_predicate(i.operands[first + 2]);
    bits = how == kAnd ? bits & c : how == kOr ? bits | c : bits ^ c;
  }
  w.set_predicate(i.operands[0], bits, lanes);
  if (two_results) w.set_predicate(i.operands[1], ~bits, lanes);
  return Outcome::kNext;
}
template <class F>
Execute compare_as(const std::string& type) {
  if (type == "f32") return compare<F, float>;
  return for_integer(type, []<class T>(T) -> Execute { return compare<F, T>; });
}
Execute comparison(const std::string& name, const std::string& type) {
  if (name == "eq") return compare_as<Equal>(type);
  if (name == "ne")
    return type == "f32" ? compare_as<Unequal>(type) : compare_as<Unless<Equal>>(type);
  if (name == "lt" || name == "lo") return compare_as<Less>(type);
  if (name == "le" || name == "ls") return compare_as<LessEqual>(type);
  if (name == "gt" || name == "hi") return compare_as<Greater>(type);
  if (name == "ge" || name == "hs") return compare_as<GreaterEqual>(type);
  if (name == "equ") return compare_as<Unless<Unequal>>(type);
  if (name == "neu") return compare_as<Unless<Equal>>(type);
  if (name == "ltu") return compare_as<Unless<GreaterEqual>>(type);
  if (name == "leu") return compare_as<Unless<Greater>>(type);
  if (name == "gtu") return compare_as<Unless<LessEqual>>(type);
  if (name == "geu") return compare_as<Unless<Less>>(type);
  if (name == "num") return compare_as<Ordered>(type);
  if (name == "nan") return compare_as<Unless<Ordered>>(type);
  return nullptr;
}

Outcome branch(Warp&, const Instruction&, uint32_t) { return Outcome::kBranch; }
Outcome leave(Warp&, const Instruction&, uint32_t) { return Outcome::kExit; }

Outcome fail_assertion(Warp& w, const Instruction&, uint32_t) { w.fail("an assertion fails"); }

}  // namespace

Execute decode_predicate(const Words& words, Instruction& i) {
  const std::string &op = words[0], &type = words.back();
  if (op == "bra") return branch;
  if (op == "ret") return leave;
  if (op == "call") return fail_assertion;
  if (type == "pred") {
    if (op == "mov") return move_predicate;
    if (op == "and") return combine_predicates<Logic::kAnd>;
    if (op == "or") return combine_predicates<Logic::kOr>;
    if (op == "xor") return combine_predicates<Logic::kXor>;
    if (op == "not") return not_predicate;
  }
  if (op == "selp") return type.ends_with("64") ? select<uint64_t> : select<uint32_t>;
  if (op == "setp") {
    i.flags = has(words, "and") ? kAnd : has(words, "or") ? kOr : has(words, "xor") ? kXor : 0;
    if (i.text.find('|') != std::string::npos) i.flags |= kTwoResults;
    return comparison(words[1], type);
  }
  return nullptr;
}

}  // namespace emulator
