// Step 1, and the factors that other steps need: the gates of one chunk and their exponents.
//
// Tier 1: the prefix sums b, including the 0 before the first token, span at most kRangeLimit and
// rise at most kRiseLimit. One integer reference r per channel serves the whole chunk; operands
// carry the factors 2^(b - r) and 2^(r - b).
//
// Past alone (batch-invariant calls): r = 0, the limit is kPastRangeLimit, and a row's tier is that
// of the tokens up to it. Rows before the first strong one are in tier 1, also in a strong chunk,
// whose state is computed as that of any other.
//
// All other chunks have strong gates and are computed by sub-chunks of 16 tokens. Between
// sub-chunks, exponents are anchored at the row block's start; inside them a running product of
// decays replaces all exponentials. The exponents are prefix sums for q and exclusive suffix sums
// for k. For gates <= 0 all are <= 0, so nothing cancels next to a reset.
#pragma once

#include <algorithm>
#include <limits>

#include "tile.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kRangeLimit = 112;     // log2 units
constexpr double kPastRangeLimit = 80;  // log2 units; 2^(-b) reaches twice as high with r = 0
constexpr double kRiseLimit = 8;        // log2 units; beyond it 2^r could overflow a large state

// A gate (log2 units) at or below this is a reset: its decay is exactly 0.
template <typename T>
constexpr T kMinGate = std::is_same_v<T, double> ? T(-1100) : T(-150);

// From here down, gates are recognised as resets. The one spare unit covers the rounding of b's
// differences.
template <typename T>
constexpr T kResetGate = kMinGate<T> + 1;

// The gates of one chunk. Tiles are [C, ld], vectors [ld], ld = padded(K). With S~ = s_in ⊙ S and
// dS~ = c ⊙ dS':
//   o = A v + scale q_in S~       S' = a ⊙ S + c ⊙ (k_outᵀ v)       q_in  = q ⊙ eq
//   dS = a ⊙ dS' + s_in ⊙ (scale q_inᵀ do)                          k_out = k ⊙ ek
template <typename T>
struct Gates {
  int64_t ld = 0, length = 0;
  int64_t tier1_rows = 0;  // the rows before this one are in tier 1
  bool absent = false;     // nothing decays: there is no x and no b
  T range = 0;             // R, in tier 1
  T* x = nullptr;          // gates, log2 units, clamped
  T* b = nullptr;          // their inclusive prefix sums
  T* eq = nullptr;         // a row of tier 1: 2^(b - r); else 2^b
  T* ek = nullptr;         // tier 1: 2^(r - b);    else 2^(b_C - b)
  T* s_in = nullptr;       // tier 1: 2^r;          else 1
  T* a = nullptr;          // 2^b_C
  T* c = nullptr;          // tier 1: 2^(b_C - r);  else 1
  // Only for sub-chunks with strong rows; ek_local and decay for all of a strong chunk:
  T* eq_local = nullptr;  // 2^(sum of the sub-chunk's gates up to and with i)
  T* ek_local = nullptr;  // 2^(sum of the sub-chunk's gates after j)
  T* alpha = nullptr;     // 2^x
  T* decay = nullptr;     // [C / c, ld], 2^(sum of sub-chunk I's gates)

  bool in_tier1() const { return tier1_rows == length; }
  int64_t sub_chunks() const { return (length + kSubChunk - 1) / kSubChunk; }
  int64_t rows(int64_t I) const {
    return length - I * kSubChunk < kSubChunk ? length - I * kSubChunk : kSubChunk;
  }
  // Of these, the first that are in tier 1.
  int64_t tier1_rows_of(int64_t I) const {
    return std::clamp<int64_t>(tier1_rows - I * kSubChunk, 0, rows(I));
  }
  int64_t size() const { return length * ld; }

  // Takes memory from `take` for rows of ld_ elements.
  template <typename Take>
  void carve(const Take& take, int64_t ld_) {
    ld = ld_;
    for (T** p : {&x, &b, &eq, &ek, &eq_local, &ek_local, &alpha}) *p = take(kChunk * ld);
    for (T** p : {&s_in, &a, &c}) *p = take(ld);
    decay = take(kSubChunks * ld);
  }
};

// x[L, ld] from natural-log gates, in log2 units. The clamp keeps NaN.
template <typename T>
inline void load_log2(const Rows& g, const Chunk& chunk, int64_t D, Gates<T>& gates) {
  gates.length = chunk.length;
  load_rows(gates.x, gates.ld, g, chunk, D);
  const Vec<T> log2e{T(kLog2E)}, low(kMinGate<T>);
  map<T>(
      gates.size(), [&](Vec<T> g) { return Vec<T>::blendv(g * log2e, low, g * log2e < low); },
      gates.x, gates.x);
}

// x[L, ld] of the keys, from g, or from the differences of b.
template <typename T>
inline void load_gates(const Problem<T>& p, const Chunk& chunk, Gates<T>& gates) {
  if (p.g.data != nullptr) {
    load_log2(p.g, chunk, p.K, gates);
  } else {
    gates.length = chunk.length;
    const int64_t ld = gates.ld;
    load_rows(gates.x, ld, p.b, chunk, p.K);
    for (int64_t i = chunk.length - 1; i > 0; --i)
      map<T>(
          ld, [](Vec<T> next, Vec<T> previous) { return next - previous; }, gates.x + i * ld,
          gates.x + i * ld, gates.x + (i - 1) * ld);
  }
}

// The lowest and highest prefix sum of one vector of channels, including the 0 before the first
// token: so a decay across the whole chunk counts, and |b| stays within the limits of tier 1. NaN
// stays NaN.
template <typename T>
struct Span {
  Vec<T> low{T(0)}, high{T(0)};

  void include(const Vec<T>& b) {
    low = at::vec::minimum(low, b);
    high = at::vec::maximum(high, b);
  }
};

// Computes b[L, ld] and R. Returns whether the whole chunk may take tier 1; with NaN it may not.
template <typename T>
inline bool cumsum(Gates<T>& gates, T range_limit) {
  Vec<T> range(T(0)), rise(T(0));
  for (int64_t d = 0; d < gates.ld; d += Vec<T>::size()) {
    Vec<T> b(T(0));
    Span<T> span;
    for (int64_t i = 0; i < gates.length; ++i) {
      b = b + Vec<T>::loadu(gates.x + i * gates.ld + d);
      b.store(gates.b + i * gates.ld + d);
      span.include(b);
    }
    range = at::vec::maximum(range, span.high - span.low);
    rise = at::vec::maximum(rise, span.high);
  }
  gates.range = largest_lane(range);
  return all_at_most(range, range_limit) && all_at_most(rise, T(kRiseLimit));
}

// R of the tokens up to each row: ranges[C], whose largest lane counts. It is infinite from a NaN,
// or a b above kRiseLimit, on.
template <typename T>
inline void ranges_of_rows(const Gates<T>& gates, Vec<T>* ranges) {
  const Vec<T> infinite(std::numeric_limits<T>::infinity()), rise_limit{T(kRiseLimit)};
  std::fill_n(ranges, gates.length, Vec<T>(T(0)));
  if (gates.absent) return;
  for (int64_t d = 0; d < gates.ld; d += Vec<T>::size()) {
    Span<T> span;
    for (int64_t i = 0; i < gates.length; ++i) {
      span.include(Vec<T>::loadu(gates.b + i * gates.ld + d));
      const Vec<T> range = Vec<T>::blendv(infinite, span.high - span.low, span.high <= rise_limit);
      ranges[i] = at::vec::maximum(ranges[i], range);
    }
  }
}

template <typename T>
constexpr T range_limit(const Problem<T>& p) {
  return p.past_alone ? T(kPastRangeLimit) : T(kRangeLimit);
}

// The rows of tier 1 of a chunk that is not in it as a whole. The ranges of both sides add up.
template <typename T>
inline int64_t first_strong_row(const Problem<T>& p, const Gates<T>& gates,
                                const Gates<T>* keys = nullptr) {
  if (!p.past_alone) return 0;
  Vec<T> ranges[kChunk], key_ranges[kChunk];
  ranges_of_rows(gates, ranges);
  if (keys != nullptr) ranges_of_rows(*keys, key_ranges);
  const auto range = [&](int64_t row) {
    return largest_lane(ranges[row]) + (keys == nullptr ? T(0) : largest_lane(key_ranges[row]));
  };
  int64_t row = 0, end = gates.length - 1;  // the last row is strong
  while (row < end) {
    const int64_t between = (row + end) / 2;
    if (range(between) <= range_limit(p))
      row = between + 1;
    else
      end = between;
  }
  return row;
}

// The middle of the range of one vector of channels.
template <typename T>
inline Vec<T> middle(const Gates<T>& g, int64_t d) {
  Span<T> span;
  for (int64_t i = 0; i < g.length; ++i) span.include(Vec<T>::loadu(g.b + i * g.ld + d));
  return ((span.low + span.high) * Vec<T>(T(0.5))).round();
}

template <typename T>
inline void tier1_exponents(const Problem<T>& p, Gates<T>& g) {
  const int64_t last = (g.length - 1) * g.ld;
  for (int64_t d = 0; d < g.ld; d += Vec<T>::size()) {
    const Vec<T> r = p.past_alone ? Vec<T>(T(0)) : middle(g, d);
    for (int64_t i = 0; i < g.length; ++i) {
      const Vec<T> e = (Vec<T>::loadu(g.b + i * g.ld + d) - r).exp2();
      e.store(g.eq + i * g.ld + d);
      e.reciprocal().store(g.ek + i * g.ld + d);
    }
    const Vec<T> b_last = Vec<T>::loadu(g.b + last + d);
    r.exp2().store(g.s_in + d);
    b_last.exp2().store(g.a + d);
    (b_last - r).exp2().store(g.c + d);
  }
}

template <typename T>
inline void anchored_exponents(Gates<T>& g) {
  const int64_t ld = g.ld;
  for (int64_t d = 0; d < ld; d += Vec<T>::size()) {
    Vec<T> before(T(1));  // the decay of the sub-chunks already passed
    for (int64_t I = 0; I < g.sub_chunks(); ++I) {
      const int64_t first = I * kSubChunk, end = first + g.rows(I);
      Vec<T> sum(T(0));
      for (int64_t i = first; i < end; ++i) {
        const Vec<T> x = Vec<T>::loadu(g.x + i * ld + d);
        sum = sum + x;
        if (end <= g.tier1_rows) continue;
        const Vec<T> e = sum.exp2();
        e.store(g.eq_local + i * ld + d);
        (e * before).store(g.eq + i * ld + d);
        x.exp2().store(g.alpha + i * ld + d);
      }
      const Vec<T> decay = sum.exp2();
      decay.store(g.decay + I * ld + d);
      before = before * decay;
    }
    before.store(g.a + d);
    Vec<T>(T(1)).store(g.s_in + d);
    Vec<T>(T(1)).store(g.c + d);
    Vec<T> after(T(1));
    for (int64_t I = g.sub_chunks() - 1; I >= 0; --I) {
      Vec<T> sum(T(0));
      for (int64_t j = I * kSubChunk + g.rows(I) - 1; j >= I * kSubChunk; --j) {
        const Vec<T> e = sum.exp2();
        e.store(g.ek_local + j * ld + d);
        (e * after).store(g.ek + j * ld + d);
        sum = sum + Vec<T>::loadu(g.x + j * ld + d);
      }
      after = after * Vec<T>::loadu(g.decay + I * ld + d);
    }
  }
  map<T>(g.tier1_rows * ld, [](Vec<T> b) { return b.exp2(); }, g.eq, g.b);
}

template <typename T>
inline void make_exponents(const Problem<T>& p, Gates<T>& gates) {
  if (gates.in_tier1()) {
    tier1_exponents(p, gates);
  } else {
    anchored_exponents(gates);
  }
}

// Without gates: tier 1, and every factor is 1.
template <typename T>
inline void make_no_gates(const Chunk& chunk, Gates<T>& gates) {
  gates.length = chunk.length;
  gates.tier1_rows = chunk.length;
  gates.absent = true;
  for (T* factors : {gates.eq, gates.ek}) fill(factors, gates.size(), T(1));
  for (T* factors : {gates.s_in, gates.a, gates.c}) fill(factors, gates.ld, T(1));
}

// Everything above for one chunk. The tiers depend only on the chunk's gates, so every step takes
// the same.
template <typename T>
inline void make_gates(const Problem<T>& p, const Chunk& chunk, Gates<T>& gates) {
  if (p.g.data == nullptr && p.b.data == nullptr) return make_no_gates(chunk, gates);
  load_gates(p, chunk, gates);
  const bool whole = cumsum(gates, range_limit(p));
  gates.tier1_rows = whole ? gates.length : first_strong_row(p, gates);
  make_exponents(p, gates);
}

// make_gates for the gates on values. In tier 1 a state is multiplied by 2^r of the keys and of the
// values, so the sum of both ranges must not exceed the limit.
template <typename T>
inline void make_value_gates(const Problem<T>& p, const Chunk& chunk, const Gates<T>& keys,
                             Gates<T>& gates) {
  load_log2(p.gv, chunk, p.V, gates);
  const bool whole = cumsum(gates, range_limit(p)) && keys.in_tier1() &&
                     keys.range + gates.range <= range_limit(p);
  gates.tier1_rows = whole ? gates.length : first_strong_row(p, gates, &keys);
  make_exponents(p, gates);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
