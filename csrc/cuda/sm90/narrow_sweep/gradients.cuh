// narrow_sweep.cu: the gradients of a chunk whose operands and dS~ are there.
#pragma once

#include "../gradient_sweep/gates.cuh"
#include "../gradient_sweep/results.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// A of products from accumulators of [64][64], in bf16: columns up to the row's number, or from it
// on, or none.
template <Ones kKept>
struct ScoreOperand {
  uint32_t words[4][4];

  __device__ __forceinline__ ScoreOperand(const float (&d)[32], bool none) {
    for_pairs([&](uint32_t& word, int row, int column, int i) {
      if (none) row = kKept == Ones::kUpTo ? -1 : kTile;
      const auto kept = [&](int c) { return kKept == Ones::kUpTo ? c <= row : c >= row; };
      word = pack(kept(column) ? d[i] : 0.f, kept(column + 1) ? d[i + 1] : 0.f);
    });
  }
  // Rows and columns of a matrix in memory, exchanged; zero where there is none.
  __device__ __forceinline__ void load(const bf16* matrix, int32_t stride, int rows) {
    const auto* elements = reinterpret_cast<const uint16_t*>(matrix);
    for_pairs([&](uint32_t& word, int row, int column, int) {
      const auto at = [&](int c) -> uint32_t {
        return c < rows ? elements[c * stride + row] : uint16_t{0};
      };
      word = at(column) | at(column + 1) << 16;
    });
  }
  // d += A B, B [64 summed][64]
  __device__ __forceinline__ void multiply(float (&d)[32], uint32_t b, bool add = true) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<Contiguous::kOther>(d, words[i], descriptor(b + i * 16 * 128, 0), add || i > 0);
  }

 private:
  // f(pair, its row and first column, and its place in accumulators)
  template <class F>
  __device__ __forceinline__ void for_pairs(F&& f) {
    const Lane lane;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      f(words[i / 4][i % 4], lane.row + i % 2 * 8, i / 2 * 8 + 2 * lane.t, 2 * i);
  }
};

// A warp's rows of a tile to a chunk's rows of an output.
__device__ __forceinline__ void write_rows(const TileRows& rows, const SegmentRows<bf16>& to,
                                           int chunk, int length, int columns) {
  const WarpRows at;
  const int left = 8 * at.piece < columns ? length - at.row : 0;
  bf16* row = to.at(chunk * kTile + at.row) + 8 * at.piece;
#pragma unroll
  for (int j = 0; j < WarpRows::kRows; ++j)
    if (j * WarpRows::kRowsEach < left)
      *reinterpret_cast<uint4*>(row + j * WarpRows::kRowsEach * to.stride) = rows.words[j];
}

// dq, dk and dg outside tier 1, from products of the states alone: what pairs of tokens owe to them
// is in memory.
__device__ __forceinline__ void finish_exact(Shared& s, const Problem& p, Stage& tiles,
                                             Factors& factors, const float (&x)[32],
                                             const float (&y)[32], int i) {
  const GatePart<bf16> part(p, s.segment, 0);
  const int chunk = chunk_of(s.segment, i);
  const FloatTile q_terms{tiles.S, tiles.d_o}, k_terms{tiles.q, tiles.k};
  part.write_exponents(s.own, q_terms, part.load(i), factors, 0, chunk, kGradients);
  part.write_exact_exponents(s.own, k_terms, factors, 0, chunk);
  role_barrier(kGradients);  // the exponents are written
  finish_exact(x, q_terms, p.scale);
  finish_exact(y, k_terms, 1.f);
  role_barrier(kGradients);  // dq and dk are
  part.write_exact_gradients(s.own, q_terms, k_terms, factors, 0, chunk, kGradients);
}

__device__ __forceinline__ void make_gradients(Shared& s, const Problem& p) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  using Part = GatePart<bf16>;
#pragma unroll 1
  for (int i = 0; i < s.segment.chunks; ++i) {
    const int stage = i % kSweepStages, chunk = chunk_of(s.segment, i),
              length = s.segment.length_of(chunk);
    Stage& tiles = s.stages[stage];
    Factors& factors = s.factors[stage];
    const uint32_t q = shared_address(tiles.q), k = shared_address(tiles.k),
                   v = shared_address(tiles.v), d_o = shared_address(tiles.d_o),
                   dS = shared_address(s.dS);
    wait(&s.ready[stage], i / kSweepStages & 1);
    const bool exact = __any_sync(0xffffffffu, s.exact[stage]);
    float x[32], y[32], dA[32];
    const uint64_t rows = descriptor(d_o, 0), S_and_v = descriptor(shared_address(tiles.S), 0);
    begin_products();
#pragma unroll
    for (int t = 0; t < 4; ++t)
      product<kSummed, kSummed>(x, dA, rows + t * (kStepBytes >> 4),
                                S_and_v + t * (kStepBytes >> 4), t > 0);
    commit_products();
    wait_for_products<0>();
    const float* enter = factors.factors[kEnter][0] + 2 * Lane().t;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 by = pair_at(enter, 8 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * j + e] *= e % 2 == 0 ? by.x : by.y;
    }
    const ScoreOperand<Ones::kUpTo> score_grads(dA, exact);
    float dA_t[32];  // the transpose, made anew
    begin_products();
    multiply<kSummed, kSummed>(y, v, dS, false);
    commit_products();
    multiply<kSummed, kSummed>(dA_t, v, d_o, false);
    score_grads.multiply(x, k);
    commit_products();
    wait_for_products<1>();
    sum_inter(factors, 0, y, tiles.k);
    wait_for_products<0>();
    const ScoreOperand<Ones::kFrom> turned(dA_t, exact);
    float A[32];  // the transpose
    begin_products();
    multiply<kSummed, kSummed>(A, k, q, false);
    commit_products();
    turned.multiply(y, q);
    commit_products();
    wait_for_products<1>();
    ScoreOperand<Ones::kFrom> scores(A, exact);
    if (exact)
      scores.load(
          rows_at<const bf16>(p.A, s.segment.row, s.segment.token_of(chunk), s.segment.head),
          token_offset(p.A, 1), length);
    float dv[32];
    begin_products();
    scores.multiply(dv, d_o, false);
    multiply<kSummed, kOther>(dv, k, dS);
    commit_products();
    wait_for_products<0>();
    arrive_as_warp(&s.taken);
    wait(&s.summed[stage], i / kSweepStages & 1);
    role_barrier(kGradients);  // all tiles but the gates are read, sum_inter's sums are written
    store_tile(tiles.v, dv);
    TileRows dv_rows;
    if (exact) {
      dv_rows.read(tiles.v);
      finish_exact(s, p, tiles, factors, x, y, i);
      arrive(&s.empty[stage]);
      write_rows(dv_rows, s.dv, chunk, length, p.V);
      continue;
    }
    float exponents[32];
    begin_products();
    Triangle<Ones::kUpTo>(thread_index()).sum(exponents, tiles.g, false);
    commit_products();
    Part::sum_states(s.own, factors, 0);
    wait_for_products<0>();
    Part::to_exponents(exponents, factors, 0);
    const GradientTiles to{tiles.q, tiles.k, tiles.S, tiles.d_o};
    finish(to, x, y, exponents, tiles.q, tiles.k, p.scale);
    fence_for_products();
    role_barrier(kGradients);  // what dg sums is written
    float dg[32];
    Part::load_states(dg, s.own);
    begin_products();
    const Triangle<Ones::kFrom> ones(thread_index());
    ones.sum(dg, to.high, true);
    ones.sum(dg, to.low, true);
    commit_products();
    TileRows dq_rows, dk_rows, dg_rows;
    dq_rows.read(to.dq);
    dk_rows.read(to.dk);
    dv_rows.read(tiles.v);
    wait_for_products<0>();
    store_tile(tiles.g, dg);
    dg_rows.read(tiles.g);
    arrive(&s.empty[stage]);
    write_rows(dv_rows, s.dv, chunk, length, p.V);
    write_rows(dq_rows, s.dq, chunk, length, p.K);
    write_rows(dk_rows, s.dk, chunk, length, p.K);
    write_rows(dg_rows, s.dg, chunk, length, p.K);
  }
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
