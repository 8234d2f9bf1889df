// gradients/chunk: the products of the warpgroups.
#pragma once

#include "cuda/sm90/tiles/lane_rows.cuh"
#include "operands.cuh"

namespace gla_ext::cuda::sm90::gradients::chunk {

// Copies A of a strong chunk or of a chunk pair.
template <int kTiles>
__device__ __forceinline__ void copy_scores(Shared<kTiles>& s, const Problem& p,
                                            const Chunk& chunk) {
  constexpr int kGroups = kGroupsFor<kTiles>;
  if constexpr (kReady<kTiles>) {
    const unsigned char* A = prepared_at(p, chunk.entry, kGroupsOf<kTiles>);
#pragma unroll
    for (int at = 0; at < kTileBytes; at += kGroups * kGroupThreads * 16) {
      const int offset = thread_index() * 16 + at;
      copy16(shared_address(&s.A) + offset, A + offset, true);
    }
  } else {
    const Mover<kGroups> mover;
    mover.template copy<kTile>(
        &s.A, rows_at<const bf16>(p.A, chunk) + token_offset(p.A, mover.row) + mover.column,
        token_offset(p.A, 1), chunk.length, true);
  }
}

// Puts A of the chunk into shared memory.
template <int kTiles>
__device__ __forceinline__ void scores(Shared<kTiles>& s, const Problem& p, const Chunk& chunk,
                                       bool strong) {
  constexpr int kN = 32 / kGroupsFor<kTiles>;
  if (strong) {
    copy_scores(s, p, chunk);
    return commit_copies();
  }
  const Place at;
  float A[kN];
  clear(A);
  begin_products();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mma_ABt(A, s.q[i], Operand(s.k[i]).from_row(at.group * 2 * kN));
  commit_products();
  wait_for_products<0>();
  store_scores(s.A, A);
}

// The part of x and y that a warpgroup makes. A single warpgroup makes both, for 64 key channels.
// If there are several, each makes x or y of 128 key channels: such wide products read do and v
// from shared memory less often. If the number of tiles is odd, one warpgroup of each kind makes
// only the last tile.
template <int kTiles>
struct Part {
  static constexpr int kGroups = kGroupsFor<kTiles>;
  const int group = Place().group;

  // Whether the i-th accumulators are of x.
  __device__ __forceinline__ bool makes_x(int i = 0) const {
    return kTiles == 1 ? i == 0 : group < kGroups / 2;
  }
  __device__ __forceinline__ int tile(int i = 0) const {
    if constexpr (kTiles == 1)
      return 0;
    else
      return 2 * half() + i;
  }
  // The warpgroup's number among those that make the same of x and y.
  __device__ __forceinline__ int half() const {
    static_assert(kTiles > 1);
    return group % (kGroups / 2);
  }
  // Calls f(whether it makes two tiles) in separate branches: otherwise ptxas serialises the
  // products.
  template <class F>
  __device__ __forceinline__ void by_width(F&& f) const {
    if constexpr (kHasAbsent<kTiles>) {
      if (half() == 0)
        f(std::true_type{});
      else
        f(std::false_type{});
    } else {
      f(std::true_type{});
    }
  }
};

template <int kTiles>
struct Accumulators {
  float d[2][32];

  __device__ __forceinline__ Accumulators() {
    clear(d[0]);
    clear(d[1]);
  }
  // Calls f(d[i], whether of x, tile) for each of the accumulators.
  template <class F>
  __device__ __forceinline__ void for_tiles(F&& f) {
    const Part<kTiles> part;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (!kHasAbsent<kTiles> || part.tile(i) < kTiles) f(d[i], part.makes_x(i), part.tile(i));
  }
  // Adds A B for two tiles of B, or for one.
  template <Contiguous kA, Contiguous kB, bool kTwo>
  __device__ __forceinline__ void multiply_tiles(std::bool_constant<kTwo>, const Operand& A,
                                                 const Operand& B) {
    if constexpr (kTwo)
      multiply<kA, kB>(d, A, B);
    else
      multiply<kA, kB>(d[0], A, B);
  }
  // Adds do S^T and v dS^T, where the states are tiles [64 of K][64 values].
  template <class TwoTiles>
  __device__ __forceinline__ void multiply_states(const Part<kTiles>& part, TwoTiles two,
                                                  const Operand& d_o, const Operand& v,
                                                  const Operand& S, const Operand& dS) {
    constexpr auto kSummed = Contiguous::kSummed;
    if constexpr (kTiles == 1) {
      mma_ABt(d[0], d_o, S);
      mma_ABt(d[1], v, dS);
    } else {
      multiply_tiles<kSummed, kSummed>(two, part.makes_x() ? d_o : v,
                                       (part.makes_x() ? S : dS).from_tile(part.tile()));
    }
  }
  // Adds dA k^ and dA^T q^, and waits for the products.
  __device__ __forceinline__ void multiply_scores(const Tile& dA, const Tile (&k)[kTiles],
                                                  const Tile (&q)[kTiles]) {
    constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
    const Part<kTiles> part;
    if constexpr (kTiles == 1) {
      begin_products();
      mma_AB(d[0], dA, k[0]);
      mma_AtB(d[1], dA, q[0]);
      commit_products();
      wait_for_products<0>();
    } else {
      part.by_width([&](auto two) {
        if (part.makes_x()) {  // separate branches: otherwise ptxas serialises the products
          begin_products();
          multiply_tiles<kSummed, kOther>(two, dA, k[part.tile()]);
          commit_products();
          wait_for_products<0>();
        } else {
          begin_products();
          multiply_tiles<kOther, kOther>(two, dA, q[part.tile()]);
          commit_products();
          wait_for_products<0>();
        }
      });
    }
  }
};

// Adds this thread's half of a row of S dS' to `sum`.
template <int kTiles>
__device__ __forceinline__ void add_states(float& sum,
                                           const typename Shared<kTiles>::States& states) {
  const int thread = thread_index(), row = thread / 2, half = thread % 2;
  if (kHasAbsent<kTiles> && row >= kTiles * kTile) return;
#pragma unroll 2
  for (int i = 0; i < 4; ++i) {
    const int at = swizzled(row, 4 * half + i);
    const auto S = load8_aligned(&in_tile<bf16>(*states.S, at));
    const auto dS = load8_aligned(&in_tile<bf16>(*states.dS, at));
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += S[e] * dS[e];
  }
}

// Computes everything that is summed over values: dv, do S^T, v dS'^T, do v^T and rowsum(S dS').
template <int kTiles, int kN>
__device__ __forceinline__ void multiply_values(Accumulators<kTiles>& acc, float (&dA)[kN],
                                                Shared<kTiles>& s, const Problem& p) {
  constexpr int kColumns = 2 * kN;
  constexpr bool kInTurn = Shared<kTiles>::kInTurn;
  Operand k_out = s.k[0];
  if constexpr (!kReady<kTiles>) k_out = s.own.k_out;
  float sum = 0;  // sum over the states
  LaneRows<32> dv_rows;
  const auto write_dv = [&](int first) {
    const int column = first + thread_index() / kGroupThreads * 32 % kTile;
    dv_rows.write_rows(s.bases.dv + column, token_offset(p.dv, 1), s.chunk.length, p.V - column);
  };
#pragma unroll 1
  for (int first = 0; first < p.V; first += kTile) {
    const bool more = first + kTile < p.V;
    wait_for_copies<0>();
    if constexpr (kReady<kTiles>) s.wait_for_states(first);
    fence_for_products();  // for copies, and before bulk copies over states that were read
    __syncthreads();       // values, states and A have arrived; the previous dv is read
    const auto copy_next = [&] {
      copy_values(s, p, s.bases, s.chunk.length, first + kTile);
      copy_states(s, p, s.bases, s.chunk.state, first + kTile);
    };
    if (s.kAhead && more) copy_next();
    const auto& states = s.states(first);
    const Operand dS = states.dS[0];
    const auto& values = s.values(first);
    const Operand d_o = values.d_o, v = values.v;
    const Part<kTiles> part;
    const auto multiply_all = [&](auto makes_dv, auto two) {
      constexpr int kValues = kInTurn ? 32 : kColumns;  // columns of dv
      const int column = part.group * kValues % kTile;
      float dv[kValues / 2];
      clear(dv);
      begin_products();
      acc.multiply_states(part, two, d_o, v, states.S[0], dS);
      mma_ABt(dA, d_o, v.from_row(part.group * kColumns));
      if constexpr (makes_dv) {
        mma_AtB(dv, s.A, d_o.from_column(column));
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          mma_AB(dv, k_out.from_tile(i), dS.from_tile(i).from_column(column));
      }
      commit_products();
      if constexpr (kInTurn && !makes_dv)
        if (first > 0) write_dv(first - kTile);
      add_states<kTiles>(sum, states);
      wait_for_products<0>();
      if constexpr (kInTurn) {
        if constexpr (makes_dv) dv_rows = LaneRows<kValues>(dv);
      } else {
        store_columns(s.dv, dv);
      }
    };
    part.by_width([&](auto two) {
      if (kInTurn && first / kTile % 2 != part.group / 2)
        multiply_all(std::false_type{}, two);
      else
        multiply_all(std::true_type{}, two);
    });
    if (!s.kAhead || !more) {
      if (kReady<kTiles> && !s.kAhead) fence_for_products();  // the states are read
      __syncthreads();  // dv is written, the operands are read
      if (s.kAhead)
        copy_operands(s.q, prepared_at(p, s.chunk.entry), s.kKeptTiles);
      else if (more)
        copy_next();
    }
    commit_copies();
    if constexpr (!kInTurn) write_values(s, p, first);
  }
  if constexpr (kInTurn) {
    const int last = (p.V - 1) / kTile;
    if (last % 2 == thread_index() / kGroupThreads / 2) write_dv(last * kTile);
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  const int channel = thread_index() / 2;
  if (thread_index() % 2 == 0) s.sums().states[channel] = sum;
}

// Scales both accumulators to match the products inside the chunk.
__device__ __forceinline__ void scale_inter(Accumulators<1>& acc, const Shared<1>& s, bool strong) {
  const Place at;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 last = pair_at(s.own.b_last, 8 * j + 2 * at.t);
    const References rx(last.x, strong), ry(last.y, strong);
    const float2 from = make_float2(exp2_ftz(rx.from), exp2_ftz(ry.from));
    const float2 to = make_float2(exp2_ftz(last.x - rx.to), exp2_ftz(last.y - ry.to));
    auto& [x, y] = acc.d;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      x[4 * j + 2 * e] *= from.x;
      x[4 * j + 2 * e + 1] *= from.y;
      y[4 * j + 2 * e] *= to.x;
      y[4 * j + 2 * e + 1] *= to.y;
    }
  }
}

// For the key channels of a tile: sums an operand times accumulators over the tokens of each warp.
template <int kTiles>
__device__ __forceinline__ void sum_tokens(float (&to)[kSubChunks][Shared<kTiles>::kChannels],
                                           const Tile (&operand)[kTiles], const float (&d)[32],
                                           int tile) {
  const Place at;
  float sums[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2 x =
          unpack(in_tile<uint32_t>(operand[tile], swizzled(at.row + 8 * e, j) + 4 * at.t));
      sum = sum + x * make_float2(d[4 * j + 2 * e], d[4 * j + 2 * e + 1]);
    }
    sums[2 * j] = sum.x;
    sums[2 * j + 1] = sum.y;
  }
  // Now lane 4 g + t has pair t of the g-th eight columns, summed over the warp's rows.
  fold_rows<4>(sums);
  fold_rows<2>(sums);
  fold_rows<1>(sums);
  const int warp = at.thread % kGroupThreads / 32, g = at.thread % 32 / 4;
  pair_at(to[warp], tile * kTile + 8 * g + 2 * at.t) = make_float2(sums[0], sums[1]);
}

// Sums k^ y over tokens: the contribution to dg of k through the states that leave the chunk.
template <int kTiles>
__device__ __forceinline__ void sum_inter(Shared<kTiles>& s, const Tile (&k)[kTiles],
                                          Accumulators<kTiles>& acc) {
  acc.for_tiles([&](float (&d)[32], bool is_x, int tile) {
    if (!is_x) sum_tokens<kTiles>(s.sums().inter, k, d, tile);
  });
}

}  // namespace gla_ext::cuda::sm90::gradients::chunk
