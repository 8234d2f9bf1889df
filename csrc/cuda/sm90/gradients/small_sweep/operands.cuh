// gradients/small_sweep: the operands of a chunk's gradients: copies, q^ and k^, and dS~.
#pragma once

#include "cuda/sm90/gradients/common/row_sums.cuh"
#include "cuda/sm90/tiles/cumsum.cuh"
#include "cuda/sm90/tiles/mover.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::gradients::small_sweep {

// Copies the i-th chunk, whose stage must be free.
__device__ __forceinline__ void load(Shared& s, const Problem& p, int i) {
  const Mover<1> at(thread_index() % kGroupThreads);
  const int chunk = chunk_of(s.segment, i), length = s.segment.length_of(chunk);
  const Stage& to = s.stages[i % kSweepStages];
  const auto copy = [&](const Tile& tile, const bf16* row, int32_t stride, int rows, int columns) {
    at.template copy<kTile>(&tile, row + at.column, stride, rows, at.column < columns);
  };
  const auto copy_tokens = [&](const Tile& tile, const SegmentRows& from, int columns) {
    copy(tile, from.at(chunk * kTile + at.row), from.stride, length, columns);
  };
  copy_tokens(to.g, s.g, p.K);
  copy_tokens(to.q, s.q, p.K);
  copy_tokens(to.k, s.k, p.K);
  const auto* S = static_cast<const bf16*>(p.S) + s.segment.chunk_head(p, chunk) * p.K * p.V;
  copy(to.S, S + at.row * p.V, p.V, p.K, p.V);
  copy_tokens(to.d_o, s.d_o, p.V);
  copy_tokens(to.v, s.v, p.V);
  commit_copies();
}

// Returns a value other than 0 if the i-th chunk is strong. Past the last chunk, returns the last
// one's flag.
__device__ __forceinline__ uint32_t load_flag(const Shared& s, const Problem& p, int i) {
  const int chunk = max(chunk_of(s.segment, i), 0);
  return p.tiers[s.segment.chunk_head(p, chunk) * kMaxTierBlocks];
}

// Clamps the gates that this thread has copied. Does the same as `clamp_gates` of a tile
// (tiles/cumsum.cuh), in a form with which ptxas does not serialise the products (C7511).
__device__ __forceinline__ void clamp_copied_gates(Tile& tile) {
  const Mover<1> at(thread_index() % kGroupThreads);
#pragma unroll
  for (int j = 0; j < kTile; j += at.kStep)
    clamp_gates(&in_tile<uint4>(tile, at.offset + j * kRowBytes));
}

// Replaces q and k by q^ and k^. Like Gating (tiles/gating.cuh), but for half of the columns at a
// time, because the sums of all columns need more than the 96 registers of this role. Each thread
// computes the references from b_C instead of reading them.
__device__ __forceinline__ void gate(Stage& tiles, float* b_last, bool strong, float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = half * kTile / 2;
    float b[16];  // natural units
    begin_products();
    Triangle<Ones::kUpTo>(thread_index()).sum(b, tiles.g, false, first);
    commit_products();
    const Fragments fragments(thread_index());
    uint32_t q_words[2][4], k_words[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      fragments.load(q_words[i], tiles.q, 2 * half + i);
      fragments.load(k_words[i], tiles.k, 2 * half + i);
    }
    wait_for_products<0>();
    const Lane lane;
    float* last = b_last + first + 2 * lane.t;
    if (lane.row + 8 == kTile - 1) {
#pragma unroll
      for (int j = 0; j < 4; ++j) pair_at(last, 8 * j) = make_float2(b[4 * j + 2], b[4 * j + 3]);
    }
    role_barrier(kOperands);  // b_C is written
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 pair = pair_at(last, 16 * i + 8 * j);
        const References x(kLog2E * pair.x, strong), y(kLog2E * pair.y, strong);
#pragma unroll
        for (int e = 2 * j; e < 2 * j + 2; ++e) {
          const float b_x = b[8 * i + 2 * e], b_y = b[8 * i + 2 * e + 1];
          const float2 q = unpack(q_words[i][e]), k = unpack(k_words[i][e]);
          q_words[i][e] = pack(q.x * (scale * exp2_ftz(fmaf(b_x, kLog2E, -x.from))),
                               q.y * (scale * exp2_ftz(fmaf(b_y, kLog2E, -y.from))));
          k_words[i][e] = pack(k.x * exp2_ftz(fmaf(b_x, -kLog2E, x.to)),
                               k.y * exp2_ftz(fmaf(b_y, -kLog2E, y.to)));
        }
      }
      fragments.store(tiles.q, 2 * half + i, q_words[i]);
      fragments.store(tiles.k, 2 * half + i, k_words[i]);
    }
  }
}

// Makes q^ and k^ of every chunk, and bf16 dS~ from dS~ in registers; then updates dS for the
// sweep's next chunk.
__device__ __forceinline__ void make_operands(Shared& s, const Problem& p) {
  using F = Fields<Sweep::kStateGrads>;
  const Segment& segment = s.segment;
  State<kTile> dS(0, 0, 0);
  dS.clear();
  load_entering<Sweep::kStateGrads>(dS, p, segment);
  float out[2] = {1.f, 1.f};  // factor still to be applied to dS~ when it leaves a chunk
  uint32_t flag = 0;
  if (segment.chunks > 0) {
    load(s, p, 0);
    flag = load_flag(s, p, 0);
  }
#pragma unroll 1
  for (int i = 0; i < segment.chunks; ++i) {
    const int stage = i % kSweepStages;
    Stage& tiles = s.stages[stage];
    Factors& factors = s.factors[stage];
    asm volatile("" : "+r"(flag));  // reading it earlier would wait for the load
    const bool strong = __any_sync(0xffffffffu, flag != 0);
    wait_for_copies<0>();
    if (strong) clamp_copied_gates(tiles.g);
    fence_for_products();
    role_barrier(kOperands);  // the chunk has arrived, b_C of the previous one is read
    gate(tiles, s.b_last, strong, p.scale);
    fence_for_products();
    role_barrier(kOperands);  // q^ and k^ are written
    float leaving[32];        // k^^T v, for dg
    begin_products();
    mma_AtB(leaving, tiles.k, tiles.v, false);
    commit_products();
    flag = load_flag(s, p, i + 1);
    wait(&s.taken, (i & 1) ^ 1);  // does not wait in the first chunk
    const Lane lane;
    float middle[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float last = kLog2E * s.b_last[lane.row + 8 * e];
      const References r(last, strong);
      out[e] *= exp2_ftz(last - r.to);
      middle[e] = exp2_ftz(r.to - r.from);
    }
    scale_rows(dS.x, out);
    store_tile(s.dS, dS.x);
    RowSums entering, left;
    entering.add(tiles.S, dS.x);
    wait_for_products<0>();
    left.add_rounded(leaving, dS.x);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = lane.row + 8 * e;
      const float from = References(kLog2E * s.b_last[row], strong).from, enter = exp2_ftz(from);
      out[e] = enter;
      const float sum = entering.sum(e) * enter, more = left.sum(e);
      if (lane.t == 0) {
        factors.factors[kEnter][0][row] = enter;
        factors.factors[kMiddle][0][row] = middle[e];
        factors.from[row] = from;
        factors.sums[row] = strong ? sum : sum + more;
      }
    }
    if (threadIdx.x == 0) s.strong[stage] = strong;
    fence_for_products();
    arrive(&s.ready[stage]);
    if (strong) scale_rows(dS.x, middle);
    begin_products();
    mma_AtB(dS.x, tiles.q, tiles.d_o);
    commit_products();
    wait_for_products<0>();
    arrive_as_warp(&s.summed[stage]);
    if (i + 1 == segment.chunks) break;
    // Waits for the previous chunk's stage; does not wait in the first chunk.
    wait(&s.empty[1 - stage], (i + 1) / kSweepStages & 1 ^ 1);
    load(s, p, i + 1);
  }
  if (!F::ends(segment) || p.dh0 == nullptr) return;
  scale_rows(dS.x, out);
  const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
  dS.store(p, p.dh0 + (segment.n * p.H + segment.head) * matrix, p.state_v_first);
}

}  // namespace gla_ext::cuda::sm90::gradients::small_sweep
