// The tiles of one chunk, and the operands that the steps share.
#pragma once

#include "gates.h"
#include "gemm.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// The tiles of the value side, for gates on values. Vp = padded(V), C = 64.
template <typename T>
struct ValueTiles {
  Gates<T> gates;
  T* do_local;           // [C, Vp], do ⊙ eq_local, strong chunks
  T *anchor, *v_anchor;  // [C, Vp], strong chunks
  T *o_intra, *dgv;      // [C, Vp], the chunk's own part of o, as backward computes it
  T *P, *R;              // [C, Vp]
  T* total;              // [Vp]
};

// One worker's tiles, carved out of one allocation. Kp = padded(K), Vp = padded(V), C = 64.
template <typename T>
struct Tiles {
  int64_t K, V, Kp, Vp;
  bool value_gated = false;
  Gates<T> gates;
  T *q, *k;                  // [C, Kp], as given
  T *q_in, *k_out;           // [C, Kp], q ⊙ eq, k ⊙ ek: tier 1's q^, k^
  T* q_local;                // [C, Kp], q ⊙ eq_local, strong chunks
  T *anchor, *k_anchor;      // [C, Kp], strong chunks: 2^(a row block's anchor - b_j), k ⊙ anchor
  T* k_t;                    // [Kp, C], keys transposed
  T *v, *d_o, *o;            // [C, Vp]; o also holds dv
  T *v_out, *do_in;          // [C, Vp], v ⊙ ek, do ⊙ eq of the values' gates; v and do without
  T* v_t;                    // [Vp, C]
  T *A, *dA, *dA_operand;    // [C, C]
  T *S, *dS, *S_in, *dS_in;  // [Kp, Vp]
  T* state_t;                // [Vp, Kp], S_in or dS_in transposed
  T *dq, *dk, *dg;           // [C, Kp]
  T *P, *R;                  // [C, Kp], products before they are gated
  T *total, *row_scale;      // [Kp]
  ValueTiles<T> values;

  // Lays the tiles out from `base`; with base == nullptr only counts. Returns the number of
  // elements.
  int64_t carve(T* base, int64_t K_, int64_t V_, bool value_gated_) {
    K = K_, V = V_, Kp = padded(K_), Vp = padded(V_), value_gated = value_gated_;
    int64_t used = 0;
    const auto take = [&](int64_t n) {
      T* p = base == nullptr ? nullptr : base + used;
      used += n;
      return p;
    };
    gates.carve(take, Kp);
    for (T** p : {&q, &k, &q_in, &k_out, &q_local, &anchor, &k_anchor, &k_t, &dq, &dk, &dg, &P, &R})
      *p = take(kChunk * Kp);
    for (T** p : {&v, &d_o, &o, &v_t}) *p = take(kChunk * Vp);
    for (T** p : {&A, &dA, &dA_operand}) *p = take(kChunk * kChunk);
    for (T** p : {&S, &dS, &S_in, &dS_in, &state_t}) *p = take(Kp * Vp);
    for (T** p : {&total, &row_scale}) *p = take(Kp);
    v_out = v, do_in = d_o;
    if (value_gated) carve_values(take);
    return used;
  }

  template <typename Take>
  void carve_values(const Take& take) {
    values.gates.carve(take, Vp);
    for (T** p : {&v_out, &do_in, &values.do_local, &values.anchor, &values.v_anchor,
                  &values.o_intra, &values.dgv, &values.P, &values.R})
      *p = take(kChunk * Vp);
    values.total = take(Vp);
  }

  int64_t length() const { return gates.length; }
};

template <typename T>
inline void load_queries(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  load_rows(t.q, t.Kp, p.q, chunk, p.K);
  gated(t.q_in, t.q, t.gates.eq, t.gates.size(), p.round_operands);
  const int64_t tier1 = t.gates.tier1_rows * t.Kp;
  gated(t.q_local + tier1, t.q + tier1, t.gates.eq_local + tier1, t.gates.size() - tier1,
        p.round_operands);
}

template <typename T>
inline void load_keys(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  load_rows(t.k, t.Kp, p.k, chunk, p.K);
  gated(t.k_out, t.k, t.gates.ek, t.gates.size(), p.round_operands);
}

template <typename T>
inline void load_values(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  load_rows(t.v, t.Vp, p.v, chunk, p.V);
  const Gates<T>& g = t.values.gates;
  if (t.value_gated) gated(t.v_out, t.v, g.ek, g.size(), p.round_operands);
}

template <typename T>
inline void load_output_grads(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  load_rows(t.d_o, t.Vp, p.d_o, chunk, p.V);
  const Gates<T>& g = t.values.gates;
  if (!t.value_gated) return;
  gated(t.do_in, t.d_o, g.eq, g.size(), p.round_operands);
  if (!g.in_tier1()) gated(t.values.do_local, t.d_o, g.eq_local, g.size(), p.round_operands);
}

// For strong chunks: the keys of the sub-chunks before I, anchored at the start of I.
template <typename T>
inline void anchor_keys(const Problem<T>& p, Tiles<T>& t, int64_t I) {
  const int64_t ld = t.Kp;
  fill(t.total, ld, T(1));  // the decay of the sub-chunks between J and I
  for (int64_t J = I - 1; J >= 0; --J) {
    for (int64_t j = J * kSubChunk; j < (J + 1) * kSubChunk; ++j)
      map<T>(ld, Times(), t.anchor + j * ld, t.gates.ek_local + j * ld, t.total);
    map<T>(ld, Times(), t.total, t.total, t.gates.decay + J * ld);
  }
  gated(t.k_anchor, t.k, t.anchor, I * kSubChunk * ld, p.round_operands);
}

// k^ of the rows in tier 1. Where others are strong, k_out belongs to the state.
template <typename T>
inline const T* tier1_keys(const Problem<T>& p, Tiles<T>& t) {
  if (t.gates.in_tier1()) return t.k_out;
  const int64_t n = t.gates.tier1_rows * t.Kp;
  map<T>(n, [](Vec<T> e) { return e.reciprocal(); }, t.anchor, t.gates.eq);
  gated(t.k_anchor, t.k, t.anchor, n, p.round_operands);
  return t.k_anchor;
}

// Zeroes the c x c block at `block` above its diagonal, by select.
template <typename T>
inline void mask_block(T* block, int64_t ld, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) fill(block + i * ld + i + 1, kSubChunk - i - 1, T(0));
}

// state[K, Vp] *= factors[Vp]
template <typename T>
inline void scale_columns(const Tiles<T>& t, T* state, const T* factors) {
  for (int64_t i = 0; i < t.K; ++i)
    map<T>(t.Vp, Times(), state + i * t.Vp, state + i * t.Vp, factors);
}

// A state as an operand: dst = rows ⊙ src ⊙ columns, rounded for bf16 inputs. In tier 1 `columns`
// are the factors of the value side; else they are 1 and not read.
template <typename T>
inline void state_operand(const Problem<T>& p, Tiles<T>& t, T* dst, const T* src, const T* rows,
                          const T* columns) {
  for (int64_t i = 0; i < t.K; ++i) {
    const Vec<T> s(rows[i]);
    map<T>(t.Vp, [&](Vec<T> x) { return x * s; }, dst + i * t.Vp, src + i * t.Vp);
  }
  if (t.value_gated && t.values.gates.in_tier1()) scale_columns(t, dst, columns);
  if (p.round_operands) round_to_bf16(dst, t.K * t.Vp);
}

// S~ and dS~
template <typename T>
inline void entering_state(const Problem<T>& p, Tiles<T>& t) {
  state_operand(p, t, t.S_in, t.S, t.gates.s_in, t.values.gates.s_in);
}
template <typename T>
inline void leaving_state_grad(const Problem<T>& p, Tiles<T>& t) {
  state_operand(p, t, t.dS_in, t.dS, t.gates.c, t.values.gates.c);
}

// S[K, Vp] <-> the stored matrix of one chunk.
template <typename T>
inline void load_chunk_state(const Problem<T>& p, int64_t index, Tiles<T>& t) {
  for (int64_t i = 0; i < t.K; ++i) {
    convert_row(t.S + i * t.Vp, p.S, p.S_dtype, (index * t.K + i) * t.V, t.V);
    std::memset(t.S + i * t.Vp + t.V, 0, (t.Vp - t.V) * sizeof(T));
  }
}

template <typename T>
inline void store_chunk_state(const Problem<T>& p, int64_t index, const Tiles<T>& t) {
  for (int64_t i = 0; i < t.K; ++i)
    convert_row_back(p.S, p.S_dtype, (index * t.K + i) * t.V, t.S + i * t.Vp, t.V);
}

template <typename T>
inline void load_chunk_state_grad(const Problem<T>& p, int64_t index, Tiles<T>& t) {
  load_state<T>(t.dS, t.Vp, p.dS + index * t.K * t.V, kAccumulated<T>, false, t.K, t.V, nullptr);
}

template <typename T>
inline void store_chunk_state_grad(const Problem<T>& p, int64_t index, const Tiles<T>& t) {
  store_state<T>(p.dS + index * t.K * t.V, kAccumulated<T>, false, t.K, t.V, t.dS, t.Vp, nullptr);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
