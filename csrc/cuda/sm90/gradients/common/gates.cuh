// For the gradient sweeps: the gates of a chunk, the exponents of dq and dk, and dg.
#pragma once

#include "cuda/sm90/prepare/prepared.cuh"
#include "warps.cuh"

namespace gla_ext::cuda::sm90::gradients {

// Turns sums of gates (natural units, for a chunk in tier 1) into the exponents of dq. Those of dk
// have the opposite sign. from_of(j): `from` of the thread's channel pair in the j-th eight.
template <class F>
__device__ __forceinline__ void to_exponents(float (&b)[32], F&& from_of) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 from = from_of(j);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      b[4 * j + e] = fmaf(b[4 * j + e], kLog2E, e % 2 == 0 ? -from.x : -from.y);
  }
}

// Computes the gates' part of a chunk; a thread has a channel pair in a sub-chunk. `Queries` and
// `Own` are shared memory of the kernel: the first has factors, states() and inter() per channel,
// the second sums of the gates and of dg.
template <class Gate>
class GatePart {
 public:
  __device__ __forceinline__ GatePart(const Problem& p, const Segment& segment, int rank)
      : p_(p), segment_(segment), first_k_(rank * kTile) {}

  // Whether the gates of a tier-1 chunk are summed by products, from a tile; bf16 holds them
  // exactly.
  static constexpr bool kByProducts = std::is_same_v<Gate, bf16>;

  // The place of the fp32 terms of dq in a strong chunk. `A` must have been read.
  template <class Own>
  static __device__ __forceinline__ FloatTile q_terms(Own& own, Tile& A) {
    if constexpr (kByProducts)
      return {A, own.tiles[0]};
    else
      return float_tile(own.tiles);
  }

  // Copies the gates of the sweep's i-th chunk to the part of `tile` from which this thread has
  // read dg.
  template <class Own>
  __device__ __forceinline__ void copy(Own& own, int i) const {
    static_assert(kByProducts);
    if (i >= segment_.chunks) return;
    const WarpRows at;
    const int chunk = chunk_of(segment_, i);
    const int rows = at.rows_of(segment_, chunk, first_k_ + 8 * at.piece < p_.K);
    const bf16* from = at.at<const bf16>(p_.g, segment_, chunk, first_k_);
    const uint32_t to = shared_address(own.tiles);
#pragma unroll
    for (int j = 0; j < WarpRows::kRows; ++j, from += token_offset(p_.g, WarpRows::kRowsEach))
      copy16(to + at.offset(j), from, j * WarpRows::kRowsEach < rows);
    commit_copies();
  }
  // Calls `to_exponents` with the exponents of the factors 2^from.
  template <class Queries>
  static __device__ __forceinline__ void make_exponents(float (&b)[32], const Queries& queries,
                                                        int rank) {
    to_exponents(b, [enter = queries.factors[kEnter][rank] + 2 * Lane().t](int j) {
      const float2 factors = pair_at(enter, 8 * j);
      return make_float2(exponent_of(factors.x), exponent_of(factors.y));
    });
  }
  // Reads the exponents that `write_exponents` has stored.
  template <class Own>
  static __device__ __forceinline__ void read_exponents(float (&exponents)[32], Own& own) {
    const Lane lane;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 pair = float_tile(own.tiles).at(lane.row + i % 2 * 8, i / 2 * 8 + 2 * lane.t);
      exponents[2 * i] = pair.x;
      exponents[2 * i + 1] = pair.y;
    }
  }
  // Sums the states' contribution to dg. All threads compute it, though half of them would do.
  template <class Own, class Queries>
  static __device__ __forceinline__ void sum_states(Own& own, Queries& queries, int rank) {
    const int thread = thread_index() % kGroupThreads, channel = thread % kTile;
    float sum = queries.states(rank)[channel];
#pragma unroll
    for (int warp = 0; warp < kGroupWarps; ++warp) sum += queries.inter(rank, warp)[channel];
    if (thread < kTile) own.states()[channel] = sum;
  }
  // Loads the sum of `sum_states` into all rows of accumulators.
  template <class Own>
  static __device__ __forceinline__ void load_states(float (&dg)[32], Own& own) {
    const float* states = own.states() + 2 * Lane().t;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 pair = pair_at(states, 8 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) dg[4 * j + e] = e % 2 == 0 ? pair.x : pair.y;
    }
  }
  // Writes fp32 dg of a tier-1 chunk from accumulators.
  __device__ __forceinline__ void write(const float (&dg)[32], int chunk) const {
    const Lane lane;
    const int channel = first_k_ + 2 * lane.t, rows = segment_.length_of(chunk) - lane.row;
    float* to =
        rows_at<float>(p_.dg, segment_.row, segment_.token_of(chunk), segment_.head) + channel;
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (8 * e < rows && channel + 8 * j < p_.K)
          *reinterpret_cast<float2*>(to + token_offset(p_.dg, lane.row + 8 * e) + 8 * j) =
              make_float2(dg[4 * j + 2 * e], dg[4 * j + 2 * e + 1]);
  }

  // Loads the gates of the sweep's i-th chunk into registers.
  __device__ __forceinline__ ChannelPairColumn<Gate> load(int i) const {
    const Place at(*this, max(0, chunk_of(segment_, i)));
    return ChannelPairColumn<Gate>(p_.g, p_, at.chunk, at.pair.first, at.channel);
  }

  // Writes the exponents of dq; in tier 1 those of dk have the opposite sign.
  template <class Own, class Queries>
  __device__ __forceinline__ void write_exponents(Own& own, const FloatTile& to,
                                                  const ChannelPairColumn<Gate>& gates,
                                                  Queries& queries, int rank, int number,
                                                  int role) const {
    const Place at(*this, number);
    sum_gates(own.gates, gates, at.pair);
    role_barrier(role);  // the gates' sums are written
    auto [b, last] = cumsum(own.gates, at.pair);
    const References from = at.references(queries, rank, last);
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) {
      b = b + to_log2(gates[i]);
      at.element(to, i) = b - from.q;
    }
  }

  // Writes the exponents of dk of a strong chunk.
  template <class Own, class Queries>
  __device__ __forceinline__ void write_strong_exponents(const Own& own, const FloatTile& to,
                                                         Queries& queries, int rank,
                                                         int number) const {
    const Place at(*this, number);
    auto [b, last] = cumsum(own.gates, at.pair);
    const References from = at.references(queries, rank, last);
#pragma unroll 1
    for (int i = 0; i < kSubChunk; ++i) {
      if (i < at.tokens) b = b + gate(at, i);
      at.element(to, i) = from.k - b;
    }
  }

  // Writes dq, dk and dg of a strong chunk, including the contributions of step 6. `q_terms` holds
  // dq through the state, `k_terms` dk through the state's gradient.
  template <class Own, class Queries>
  __device__ __forceinline__ void write_strong_gradients(Own& own, const FloatTile& q_terms,
                                                         const FloatTile& k_terms, Queries& queries,
                                                         int rank, int number, int role) const {
    const Place at(*this, number);
    const auto read = [](const auto* row) { return load2<Access::kFast>(row, 2); };
    float2 sum = make_float2(0.f, 0.f), inter = sum;
#pragma unroll 1
    for (int i = 0; i < kSubChunk; ++i) {
      float2 term = make_float2(0.f, 0.f);
      if (i < at.tokens) {
        float2 dq = at.element(q_terms, i), dk = at.element(k_terms, i);
        const float2 to_k = read(at.template row<const bf16>(p_.k, i)) * dk;
        term = read(at.template row<const bf16>(p_.q, i)) * dq - to_k;
        inter = inter + to_k;
        dq = dq + read(at.template row<const float>(p_.dq_intra, i));
        dk = dk + read(at.template row<const float>(p_.dk_intra, i));
        store2<Access::kFast>(at.template row<bf16>(p_.dq, i), dq.x, dq.y, 2);
        store2<Access::kFast>(at.template row<bf16>(p_.dk, i), dk.x, dk.y, 2);
      }
      at.element(q_terms, i) = term;
      sum = sum + term;
    }
    pair_at(own.dg[at.pair.sub_chunk], at.pair.channel) = sum;
    pair_at(queries.inter(rank, at.pair.sub_chunk), at.pair.channel) = inter;
    role_barrier(role);  // the sums are written
    sum = pair_at(queries.states(rank), at.pair.channel) *
          pair_at(queries.factors[kMiddle][rank], at.pair.channel);
    for (int part = 0; part < kSubChunks; ++part) {
      sum = sum + pair_at(queries.inter(rank, part), at.pair.channel);
      if (part > at.pair.sub_chunk) sum = sum + pair_at(own.dg[part], at.pair.channel);
    }
#pragma unroll 1
    for (int i = static_cast<int>(kSubChunk) - 1; i >= 0; --i) {
      sum = sum + at.element(q_terms, i);
      if (i >= at.tokens) continue;
      const float2 x = gate(at, i);
      const float2 dg = sum + read(at.template row<const float>(p_.dg_intra, i));
      store2<Access::kFast>(at.template row<Gate>(p_.dg, i), x.x <= kReset ? 0.f : dg.x,
                            x.y <= kReset ? 0.f : dg.y, 2);
    }
    role_barrier(role);  // the sums are read
  }

 private:
  // The exponent of a power of two.
  static __device__ __forceinline__ float exponent_of(float x) {
    constexpr uint32_t kTwoTo23 = 0x4b000000;  // 2^23, whose unit in the last place is 1
    return __uint_as_float(kTwoTo23 | __float_as_uint(x) >> 23) - (8388608.f + 127.f);
  }
  // The references of a channel pair: q is `from` and k is `to` in q^ = q 2^(b - from), k^ = k
  // 2^(to - b).
  struct References {
    float2 q, k;
  };
  // This thread's position in a chunk.
  struct Place {
    ChannelPair<1> pair;
    Chunk chunk;
    int channel, tokens;  // tokens: how many of this sub-chunk exist

    __device__ __forceinline__ Place(const GatePart& g, int number)
        : pair(thread_index() % kGroupThreads), channel(g.first_k_ + pair.channel) {
      const Segment& segment = g.segment_;
      const int64_t entry = segment.chunk_head(g.p_, number);
      chunk = {segment.row,
               segment.token_of(number),
               segment.length_of(number),
               segment.head,
               entry,
               entry,
               false};
      tokens = channel < g.p_.K ? chunk.length - pair.first : 0;
    }
    template <class T>
    __device__ __forceinline__ T* row(const Rows& r, int token) const {
      return rows_at<T>(r, chunk) + token_offset(r, pair.first + token) + channel;
    }
    __device__ __forceinline__ float2& element(const FloatTile& tile, int token) const {
      return tile.at(pair.first + token, pair.channel);
    }
    // The references of the prepared chunk; its b_C may be rounded differently from `b_last`.
    template <class Queries>
    __device__ __forceinline__ References references(Queries& queries, int rank,
                                                     float2 b_last) const {
      const float2 enter = pair_at(queries.factors[kEnter][rank], pair.channel),
                   middle = pair_at(queries.factors[kMiddle][rank], pair.channel);
      const float2 from = make_float2(exponent_of(enter.x), exponent_of(enter.y));
      return {from, make_float2(middle.x == 1.f ? from.x : b_last.x,
                                middle.y == 1.f ? from.y : b_last.y)};
    }
  };

  __device__ __forceinline__ float2 gate(const Place& at, int token) const {
    return to_log2(load2<Access::kFast>(at.template row<const Gate>(p_.g, token), 2));
  }

  const Problem& p_;
  const Segment& segment_;
  const int first_k_;
};

}  // namespace gla_ext::cuda::sm90::gradients
