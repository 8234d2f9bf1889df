// The tiles of one chunk, and the operands that the steps share.
#pragma once

#include "gates.h"
#include "gemm.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// One worker's tiles, carved out of one allocation. Kp = padded(K), Vp = padded(V), C = 64.
template <typename T>
struct Tiles {
  int64_t K, V, Kp, Vp;
  Gates<T> gates;
  T *q, *k;                  // [C, Kp], as given
  T *q_in, *k_out;           // [C, Kp], q ⊙ eq, k ⊙ ek: tier 1's q^, k^
  T* q_local;                // [C, Kp], q ⊙ eq_local, tiers 2 + 3
  T *anchor, *k_anchor;      // [C, Kp], tiers 2 + 3: 2^(anchor of a row block - b_j), k ⊙ anchor
  T* k_t;                    // [Kp, C], keys transposed
  T *v, *d_o, *o;            // [C, Vp]; o also holds dv
  T* v_t;                    // [Vp, C]
  T *A, *dA, *dA_operand;    // [C, C]
  T *S, *dS, *S_in, *dS_in;  // [Kp, Vp]
  T* state_t;                // [Vp, Kp], S_in or dS_in transposed
  T *dq, *dk, *dg;           // [C, Kp]
  T *P, *R;                  // [C, Kp], products before they are gated
  T *total, *row_scale;      // [Kp]

  // Lays the tiles out from `base`; with base == nullptr only counts. Returns the number of
  // elements.
  int64_t carve(T* base, int64_t K_, int64_t V_) {
    K = K_, V = V_, Kp = padded(K_), Vp = padded(V_);
    int64_t used = 0;
    const auto take = [&](int64_t n) {
      T* p = base == nullptr ? nullptr : base + used;
      used += n;
      return p;
    };
    gates.ld = Kp;
    for (T** p : {&gates.x,
                  &gates.b,
                  &gates.eq,
                  &gates.ek,
                  &gates.eq_local,
                  &gates.ek_local,
                  &gates.alpha,
                  &q,
                  &k,
                  &q_in,
                  &k_out,
                  &q_local,
                  &anchor,
                  &k_anchor,
                  &k_t,
                  &dq,
                  &dk,
                  &dg,
                  &P,
                  &R})
      *p = take(kChunk * Kp);
    for (T** p : {&v, &d_o, &o, &v_t}) *p = take(kChunk * Vp);
    for (T** p : {&A, &dA, &dA_operand}) *p = take(kChunk * kChunk);
    for (T** p : {&S, &dS, &S_in, &dS_in, &state_t}) *p = take(Kp * Vp);
    for (T** p : {&gates.s_in, &gates.a, &gates.c, &total, &row_scale}) *p = take(Kp);
    gates.decay = take(kSubChunks * Kp);
    return used;
  }

  int64_t length() const { return gates.length; }
};

template <typename T>
inline void load_queries(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  load_rows(t.q, t.Kp, p.q, chunk, p.K);
  gated(t.q_in, t.q, t.gates.eq, t.gates.size(), p.round_operands);
  if (!t.gates.mid_reference)
    gated(t.q_local, t.q, t.gates.eq_local, t.gates.size(), p.round_operands);
}

template <typename T>
inline void load_keys(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  load_rows(t.k, t.Kp, p.k, chunk, p.K);
  gated(t.k_out, t.k, t.gates.ek, t.gates.size(), p.round_operands);
}

// Tiers 2 + 3: keys of the sub-chunks before I, anchored at the start of I.
template <typename T>
inline void anchor_keys(const Problem<T>& p, Tiles<T>& t, int64_t I) {
  const int64_t ld = t.Kp;
  fill(t.total, ld, T(1));  // the decay of the sub-chunks between J and I
  for (int64_t J = I - 1; J >= 0; --J) {
    for (int64_t j = J * kSubChunk; j < (J + 1) * kSubChunk; ++j)
      map<T>(
          ld, [](Vec<T> e, Vec<T> m) { return e * m; }, t.anchor + j * ld,
          t.gates.ek_local + j * ld, t.total);
    map<T>(ld, [](Vec<T> m, Vec<T> d) { return m * d; }, t.total, t.total, t.gates.decay + J * ld);
  }
  gated(t.k_anchor, t.k, t.anchor, I * kSubChunk * ld, p.round_operands);
}

// Zeroes what lies above the diagonal of the c x c block at `block`, by select.
template <typename T>
inline void mask_block(T* block, int64_t ld, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) fill(block + i * ld + i + 1, kSubChunk - i - 1, T(0));
}

// The state as an operand: dst = scale ⊙ src by rows, rounded when asked.
template <typename T>
inline void state_operand(const Problem<T>& p, Tiles<T>& t, T* dst, const T* src, const T* scale) {
  for (int64_t i = 0; i < t.K; ++i) {
    const Vec<T> s(scale[i]);
    map<T>(t.Vp, [&](Vec<T> x) { return x * s; }, dst + i * t.Vp, src + i * t.Vp);
  }
  if (p.round_operands) round_to_bf16(dst, t.K * t.Vp);
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
  load_state(t.dS, t.Vp, p.dS + index * t.K * t.V, false, t.K, t.V);
}

template <typename T>
inline void store_chunk_state_grad(const Problem<T>& p, int64_t index, const Tiles<T>& t) {
  store_state(p.dS + index * t.K * t.V, false, t.K, t.V, t.dS, t.Vp);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
