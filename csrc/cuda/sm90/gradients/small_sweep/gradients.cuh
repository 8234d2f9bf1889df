// gradients/small_sweep: the gradients of a chunk from its q^, k^ and dS~.
#pragma once

#include "cuda/sm90/gradients/common/gates.cuh"
#include "cuda/sm90/gradients/common/results.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::gradients::small_sweep {

// A bf16 A operand of a product, made from accumulators [64][64]. It keeps the columns up to the
// row's number, or those from it on; it is all zero if `none`.
template <Ones kKept>
struct ScoreOperand {
  uint32_t words[4][4];

  __device__ __forceinline__ ScoreOperand(const float (&d)[32], bool none) {
    constexpr bool kUpTo = kKept == Ones::kUpTo;
    constexpr uint32_t kAll = 0xffffffff, kFirst = 0xffff;  // masks of a column pair
    const int thread = thread_index(), row = thread % kWarp / 4, column = thread % 4 * 2;
    const int warp = none ? (kUpTo ? -1 : 4) : thread % kGroupThreads / kWarp;
    // The mask of an 8 x 8 block on the diagonal.
    const uint32_t corner = kUpTo
                                ? (column <= row ? kFirst : 0) | (column < row ? ~kFirst : 0)
                                : (column >= row ? kFirst : 0) | (column + 1 >= row ? ~kFirst : 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t beside = (kUpTo ? i < warp : i > warp) ? kAll : 0;
      const uint32_t on = i == warp ? corner : beside, either = i == warp ? kAll : beside;
      const uint32_t masks[4] = {on, kUpTo ? either : beside, kUpTo ? beside : either, on};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        words[i][e] = pack(d[8 * i + 2 * e], d[8 * i + 2 * e + 1]) & masks[e];
    }
  }
  // d += A B with B [64 summed][64]; d = A B unless `add`.
  __device__ __forceinline__ void multiply(float (&d)[32], const Operand& B,
                                           bool add = true) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<Contiguous::kOther>(d, words[i], descriptor(B.address + i * 16 * kRowBytes, 0),
                                  add || i > 0);
  }
};

// Writes a warp's rows of tiles to a chunk's rows of outputs. The outputs have equal strides, so
// one offset serves all.
template <int kTensors>
__device__ __forceinline__ void write_rows(const TileRows (&rows)[kTensors],
                                           const OutputRows<kTensors>& to, int chunk, int length,
                                           int columns) {
  const WarpRows at;
  const int left = 8 * at.piece < columns ? length - at.row : 0;
  const int32_t step = WarpRows::kRowsEach * to.stride;
  const int64_t offset = static_cast<int64_t>(chunk * kTile + at.row) * to.stride + 8 * at.piece;
#pragma unroll
  for (int i = 0; i < kTensors; ++i) {
    bf16* row = to.first[i] + offset;
#pragma unroll
    for (int j = 0; j < WarpRows::kRows; ++j, row += step)
      if (j * WarpRows::kRowsEach < left) *reinterpret_cast<uint4*>(row) = rows[i].words[j];
  }
}

// dv += A^T do for strong chunks, both in tiles. It uses warp-level mma: ptxas has too few
// registers for another warpgroup product.
__device__ __forceinline__ void add_strong_scores(float (&dv)[32], const Tile& A, const Tile& d_o) {
  const int thread = thread_index(), lane = thread % kWarp;
  const int warp = thread % kGroupThreads / kWarp, upper = lane / 16, odd = lane / 8 % 2;
  const auto at = [](const Tile& tile, int row, int part) {
    return &in_tile<bf16>(tile, swizzled(row, part));
  };
#pragma unroll 1
  for (int token = 0; token < kTile; token += 16) {
    uint32_t a[4];
    ldmatrix_transposed(a, at(A, token + lane % 8 + 8 * upper, 2 * warp + odd));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t b[4];
      ldmatrix_transposed(b, at(d_o, token + lane % 16, 2 * i + upper));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(&dv[8 * i + 4 * j]);
        mma(d, a, b[2 * j], b[2 * j + 1]);
      }
    }
  }
}

// Writes dq, dk and dg of strong chunks. Only the states' products are made here; the contributions
// of token pairs are in memory.
__device__ __forceinline__ void finish_strong(Shared& s, const Problem& p, Stage& tiles,
                                              Factors& factors, const float (&x)[32],
                                              const float (&y)[32], int i) {
  const GatePart<bf16> part(p, s.segment, 0);
  const int chunk = chunk_of(s.segment, i);
  const FloatTile q_terms{tiles.S, tiles.d_o}, k_terms{tiles.q, tiles.k};
  part.write_exponents(s.own, q_terms, part.load(i), factors, 0, chunk, kGradients);
  part.write_strong_exponents(s.own, k_terms, factors, 0, chunk);
  role_barrier(kGradients);  // the exponents are written
  finish_strong(x, q_terms, p.scale);
  finish_strong(y, k_terms, 1.f);
  role_barrier(kGradients);  // dq and dk are written
  part.write_strong_gradients(s.own, q_terms, k_terms, factors, 0, chunk, kGradients);
}

// Computes dq, dk, dv and dg of every chunk. dA of each pair of tokens is made twice, by a product
// and by its transpose. The sums of dg require that both products add in the same order, since the
// two must cancel.
__device__ __forceinline__ void make_gradients(Shared& s, const Problem& p) {
#pragma unroll 1
  for (int i = 0; i < s.segment.chunks; ++i) {
    const int stage = i % kSweepStages, chunk = chunk_of(s.segment, i),
              length = s.segment.length_of(chunk);
    Stage& tiles = s.stages[stage];
    Factors& factors = s.factors[stage];
    const Operand q = tiles.q, k = tiles.k, v = tiles.v, d_o = tiles.d_o, dS = s.dS;
    wait(&s.ready[stage], i / kSweepStages & 1);
    const bool strong = __any_sync(0xffffffffu, s.strong[stage]);
    float x[32], y[32], dA[32];
    const uint64_t rows = descriptor(d_o), S_and_v = descriptor(tiles.S);
    begin_products();
    multiply_two(x, dA, rows, S_and_v, false);
    commit_products();
    wait_for_products<0>();
    scale_columns(x, factors.factors[kEnter][0] + 2 * Lane().t);
    const ScoreOperand<Ones::kUpTo> score_grads(dA, strong);
    float dA_t[32];  // the transpose, as another product
    begin_products();
    mma_ABt(dA_t, v, d_o, false);
    commit_products();
    mma_ABt(y, v, dS, false);
    score_grads.multiply(x, k);
    commit_products();
    wait_for_products<1>();
    const ScoreOperand<Ones::kFrom> turned(dA_t, strong);
    float A[32];  // the transpose
    begin_products();
    mma_ABt(A, k, q, false);
    commit_products();
    turned.multiply(y, q);
    commit_products();
    wait_for_products<1>();
    const ScoreOperand<Ones::kFrom> scores(A, strong);
    float dv[32];
    begin_products();
    scores.multiply(dv, d_o, false);
    mma_AB(dv, k, dS);
    commit_products();
    wait_for_products<0>();
    arrive_as_warp(&s.taken);
    wait(&s.summed[stage], i / kSweepStages & 1);
    role_barrier(kGradients);  // all tiles except the gates are read
    TileRows dv_rows[1];
    if (strong) {
      copy_rows<1, kGroupThreads>(&tiles.S, p.A, s.segment, chunk, thread_index() % kGroupThreads,
                                  0, kTile);
      commit_copies();
      wait_for_copies<0>();
      fence_for_products();      // not needed, but otherwise ptxas waits for every product (C7511)
      role_barrier(kGradients);  // A has arrived
      add_strong_scores(dv, tiles.S, tiles.d_o);
      role_barrier(kGradients);  // A and do are read
      store_tile(tiles.v, dv);
      dv_rows[0].read(tiles.v);
      finish_strong(s, p, tiles, factors, x, y, i);
      arrive(&s.empty[stage]);
      write_rows(dv_rows, s.dv, chunk, length, p.V);
      continue;
    }
    store_tile(tiles.v, dv);
    float exponents[32];
    begin_products();
    Triangle<Ones::kUpTo>(thread_index()).sum(exponents, tiles.g, false);
    commit_products();
    wait_for_products<0>();
    to_exponents(exponents,
                 [from = factors.from + 2 * Lane().t](int j) { return pair_at(from, 8 * j); });
    const GradientTiles to{tiles.q, tiles.k, tiles.S, tiles.d_o};
    finish(to, x, y, exponents, tiles.q, tiles.k, p.scale);
    fence_for_products();
    role_barrier(kGradients);  // the terms of dg are written
    float dg[32];
    GatePart<bf16>::load_states(dg, factors);
    begin_products();
    const Triangle<Ones::kFrom> ones(thread_index());
    ones.sum(dg, to.high, true);
    ones.sum(dg, to.low, true);
    commit_products();
    TileRows key_rows[3];  // dq, dk, dg
    key_rows[0].read(to.dq);
    key_rows[1].read(to.dk);
    dv_rows[0].read(tiles.v);
    wait_for_products<0>();
    store_tile(tiles.g, dg);
    key_rows[2].read(tiles.g);
    arrive(&s.empty[stage]);
    write_rows(dv_rows, s.dv, chunk, length, p.V);
    write_rows(key_rows, s.key_grads, chunk, length, p.K);
  }
}

}  // namespace gla_ext::cuda::sm90::gradients::small_sweep
