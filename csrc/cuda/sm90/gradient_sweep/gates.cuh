// gradient_sweep.cu: gates of a chunk: the exponents of dq and dk, and dg.
#pragma once

#include "shared.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// Of a chunk, a thread a pair of channels in a part of the tokens.
template <class Gate>
class GatePart {
 public:
  __device__ __forceinline__ GatePart(const Problem& p, const Segment& segment, int rank)
      : p_(p), segment_(segment), first_k_(rank * kTile) {}

  // Gates of the i-th chunk of the sweep, on their way.
  __device__ __forceinline__ PairColumn<Gate> load(int i) const {
    const Place at(*this, max(0, chunk_of(segment_, i)));
    return PairColumn<Gate>(p_.g, p_, at.chunk, at.pair.first, at.channel);
  }

  // Exponents of dq, and, but outside tier 1, of dk with the other sign.
  __device__ __forceinline__ void write_exponents(Own& own, const PairColumn<Gate>& gates,
                                                  int number, bool exact, int role) const {
    const Place at(*this, number);
    sum_gates(own.gates, gates, at.pair);
    role_barrier(role);  // the gates' sums are written
    auto [b, last] = cumsum(own.gates, at.pair);
    const References rx(last.x, exact && is_out(last.x)), ry(last.y, exact && is_out(last.y));
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) {
      b = b + to_log2(gates[i]);
      at.element(own.terms, i) = make_float2(b.x - rx.from, b.y - ry.from);
    }
  }

  // What dg sums, of a thread.
  struct Terms {
    float2 x[kSubChunk];
    float2 leaving;  // what the states that leave the chunk owe
  };
  // And its sums, of a part of the tokens.
  __device__ __forceinline__ Terms read_terms(Own& own, Queries& queries, int rank) const {
    const Pair<1> pair(thread_index() % kGroupThreads);
    Terms terms;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) {
      terms.x[i] = pair_at(own.terms, swizzled_float(pair.first + i, pair.channel));
      sum = sum + terms.x[i];
    }
    pair_at(own.dg[pair.part], pair.channel) = sum;
    terms.leaving = pair_at(queries.states(rank), pair.channel);
#pragma unroll
    for (int warp = 0; warp < kGroupWarps; ++warp)
      terms.leaving = terms.leaving + pair_at(queries.inter(rank, warp), pair.channel);
    return terms;
  }

  // dg of the chunk.
  __device__ __forceinline__ void write_gradients(const Own& own, const Terms& terms,
                                                  int number) const {
    const Place at(*this, number);
    float2 sum = terms.leaving;
#pragma unroll
    for (int part = kParts - 1; part > 0; --part)
      if (part > at.pair.part) sum = sum + pair_at(own.dg[part], at.pair.channel);
    constexpr int kLast = static_cast<int>(kSubChunk) - 1;
    Gate* dg = at.template row<Gate>(p_.dg, kLast);
#pragma unroll
    for (int i = kLast; i >= 0; --i, dg -= token_offset(p_.dg, 1)) {
      sum = sum + terms.x[i];
      if (i < at.tokens) store2<Access::kFast>(dg, sum.x, sum.y, 2);
    }
  }

  // Outside tier 1: exponents of dk.
  __device__ __forceinline__ void write_exact_exponents(const Own& own, float* terms,
                                                        int number) const {
    const Place at(*this, number);
    auto [b, last] = cumsum(own.gates, at.pair);
    const References rx(last.x, is_out(last.x)), ry(last.y, is_out(last.y));
#pragma unroll 1
    for (int i = 0; i < kSubChunk; ++i) {
      if (i < at.tokens) b = b + gate(at, i);
      at.element(terms, i) = make_float2(rx.to - b.x, ry.to - b.y);
    }
  }

  // And dq, dk and dg, of which step 6 is a part: dq of the state is at own.terms, dk of the
  // state's gradient at `terms`.
  __device__ __forceinline__ void write_exact_gradients(Own& own, float* terms, Queries& queries,
                                                        int rank, int number, int role) const {
    const Place at(*this, number);
    const auto read = [](const auto* row) { return load2<Access::kFast>(row, 2); };
    float2 sum = make_float2(0.f, 0.f), inter = sum;
#pragma unroll 1
    for (int i = 0; i < kSubChunk; ++i) {
      float2 term = make_float2(0.f, 0.f);
      if (i < at.tokens) {
        float2 dq = at.element(own.terms, i), dk = at.element(terms, i);
        const float2 to_k = read(at.template row<const bf16>(p_.k, i)) * dk;
        term = read(at.template row<const bf16>(p_.q, i)) * dq - to_k;
        inter = inter + to_k;
        dq = dq + read(at.template row<const float>(p_.dq_intra, i));
        dk = dk + read(at.template row<const float>(p_.dk_intra, i));
        store2<Access::kFast>(at.template row<bf16>(p_.dq, i), dq.x, dq.y, 2);
        store2<Access::kFast>(at.template row<bf16>(p_.dk, i), dk.x, dk.y, 2);
      }
      at.element(own.terms, i) = term;
      sum = sum + term;
    }
    pair_at(own.dg[at.pair.part], at.pair.channel) = sum;
    pair_at(queries.inter(rank, at.pair.part), at.pair.channel) = inter;
    role_barrier(role);  // the sums are written
    const float2 last = cumsum(own.gates, at.pair).last;
    sum = pair_at(queries.states(rank), at.pair.channel);
    if (is_out(last.x)) sum.x *= exp2_ftz(last.x);
    if (is_out(last.y)) sum.y *= exp2_ftz(last.y);
    for (int part = 0; part < kParts; ++part) {
      sum = sum + pair_at(queries.inter(rank, part), at.pair.channel);
      if (part > at.pair.part) sum = sum + pair_at(own.dg[part], at.pair.channel);
    }
#pragma unroll 1
    for (int i = static_cast<int>(kSubChunk) - 1; i >= 0; --i) {
      sum = sum + at.element(own.terms, i);
      if (i >= at.tokens) continue;
      const float2 x = gate(at, i);
      const float2 dg = sum + read(at.template row<const float>(p_.dg_intra, i));
      store2<Access::kFast>(at.template row<Gate>(p_.dg, i), x.x <= kReset ? 0.f : dg.x,
                            x.y <= kReset ? 0.f : dg.y, 2);
    }
    role_barrier(role);  // the sums are read
  }

 private:
  // Where this thread is in a chunk.
  struct Place {
    Pair<1> pair;
    Chunk chunk;
    int channel, tokens;  // of this part that are there

    __device__ __forceinline__ Place(const GatePart& g, int number)
        : pair(thread_index() % kGroupThreads), channel(g.first_k_ + pair.channel) {
      const Segment& segment = g.segment_;
      const int64_t slot = segment.chunk_head(g.p_, number);
      chunk = {segment.row,
               segment.token_of(number),
               segment.length_of(number),
               segment.head,
               slot,
               slot,
               false};
      tokens = channel < g.p_.K ? chunk.length - pair.first : 0;
    }
    template <class T>
    __device__ __forceinline__ T* row(const Rows& r, int token) const {
      return rows_at<T>(r, chunk) + token_offset(r, pair.first + token) + channel;
    }
    __device__ __forceinline__ float2& element(float* tile, int token) const {
      return pair_at(tile, swizzled_float(pair.first + token, pair.channel));
    }
  };

  static __device__ __forceinline__ bool is_out(float last) { return !(fabsf(last) <= kTierRange); }
  __device__ __forceinline__ float2 gate(const Place& at, int token) const {
    return to_log2(load2<Access::kFast>(at.template row<const Gate>(p_.g, token), 2));
  }

  const Problem& p_;
  const Segment& segment_;
  const int first_k_;
};

}  // namespace
}  // namespace gla_ext::cuda::sm90
