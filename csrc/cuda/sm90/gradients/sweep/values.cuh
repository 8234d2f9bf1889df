// gradients/sweep: the work before the gradients: copies, and the state.
#pragma once

#include "cuda/sm90/gradients/common/row_sums.cuh"
#include "cuda/sm90/states/fused/state.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::gradients::sweep {

// Rows of a tensor that the producer copies. A thread copies 16 bytes of row `row` and of every
// kRowsEach-th row after it.
struct CopiedRows {
  static constexpr int kPieces = 8, kRowsEach = kGroupThreads / kPieces;
  const bf16* from;
  int32_t stride;  // to this thread's next row

  // Copies columns from `first` on.
  __device__ __forceinline__ void copy(uint32_t to, int first, int rows) const {
    const bf16* p = from + first;
#pragma unroll
    for (int j = 0; j < kTile; j += kRowsEach, p += stride) copy16(to + j * kRowBytes, p, j < rows);
  }
};

template <int kSlices, class SharedOfKernel>
__device__ __forceinline__ void produce(SharedOfKernel& s, const Problem& p, int rank) {
  using Copied = CopiedRows;
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int row = thread / Copied::kPieces, column = thread % Copied::kPieces * 8;
  Ring<SharedOfKernel::kSliceStages> slice;
#pragma unroll 1
  for (int i = 0; i < segment.chunks; ++i) {
    const int chunk = chunk_of(segment, i);
    const auto rows_of = [&](const Rows& r) -> Copied {
      return {
          rows_at<const bf16>(r, segment.row, segment.token_of(chunk) + row, segment.head) + column,
          token_offset(r, Copied::kRowsEach)};
    };
    const Copied d_o = rows_of(p.d_o), v = rows_of(p.v);
    const int64_t state = segment.chunk_head(p, chunk);
    const int tokens = segment.length_of(chunk) - row;
#pragma unroll 1
    for (int j = 0; j < kSlices; ++j, slice.next()) {
      wait(&s.empty[slice.stage], slice.parity ^ 1);  // does not wait in the first round
      const Slice& to = s.slices[slice.stage];
      const int first = j * kTile;
      const bool inside = first + column < p.V;
      const uint32_t offset = swizzled(row, column / 8);
      if (thread == 0)
        bulk_copy(&to.S, state_tile_at(p, p.S, state, j, rank), kTileBytes, &s.full[slice.stage]);
      d_o.copy(shared_address(&to.d_o) + offset, first, inside ? tokens : 0);
      v.copy(shared_address(&to.v) + offset, first, inside ? tokens : 0);
      arrive_after_copies(&s.full[slice.stage]);
    }
  }
}

// Stores rowsum(S~ dS~), and the factor by which dS~ leaves the chunk.
__device__ __forceinline__ void store_sums(RowSums& rows, float* sums, const float* enter,
                                           float* factors) {
  const Lane lane;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float sum = rows.sum(e);
    const int row = lane.row + 8 * e;
    if (lane.t == 0) {
      factors[row] = enter[row];
      sums[row] = sum;
    }
  }
}

// Holds dS~ in registers. For each slice, stores dS~ in bf16 in this block and in the block that
// makes the slice's dv, then updates dS~ for the previous chunk.
template <int kSlices, class SharedOfKernel>
__device__ __forceinline__ void sweep_state(SharedOfKernel& s, const Problem& p, int rank) {
  using F = Fields<Sweep::kStateGrads>;
  const Segment& segment = s.segment;
  const int first_k = rank * kTile;
  float x[kSlices][32];
#pragma unroll
  for (int j = 0; j < kSlices; ++j) {
    State<kTile> state(j, first_k, 0);
    state.clear();
    load_entering<Sweep::kStateGrads>(state, p, segment);
#pragma unroll
    for (int e = 0; e < 32; ++e) x[j][e] = state.x[e];
  }
  if (Lane().t == 0) s.factors[Lane().row] = s.factors[Lane().row + 8] = 1.f;
  __syncwarp();
  Ring<SharedOfKernel::kSliceStages> slice;
  Ring<kStateStages> state_stage;
  for (int i = 0; i < segment.chunks; ++i) {
    Queries& queries = s.queries[i % kQueryStages];
    wait(&s.queries_full[i % kQueryStages], i / kQueryStages & 1);
    const auto& factors = queries.factors;
    const Lane lane;
    const int row = lane.row;  // the thread also has row + 8
    const auto middle = [&](int e)->volatile const float& {
      return factors[kMiddle][rank][row + 8 * e];
    };
    if (lane.t == 0) {
#pragma unroll
      for (int e = 0; e < 2; ++e) s.factors[row + 8 * e] *= factors[kLeave][rank][row + 8 * e];
    }
    __syncwarp();  // s.factors is written
    const bool strong = __any_sync(0xffffffffu, middle(0) != 1.f || middle(1) != 1.f);
    RowSums sums;
#pragma unroll
    for (int j = 0; j < kSlices; ++j) {
      const Slice& values = s.slices[slice.stage];
      Tile& dS = s.dS[state_stage.stage];
      // The slice's rows are still being copied here.
      wait(&s.taken[state_stage.stage], state_stage.parity ^ 1);  // no wait in the first round
      const volatile float* in = s.factors + Lane().row;
      scale_rows(x[j], {in[0], in[8]});
      store_tile(dS, x[j]);
      fence_for_products();  // also for the bulk copy
      arrive_as_warp(&s.ready[state_stage.stage]);
      if (j % kClusterBlocks != rank) {
        role_barrier(kState);  // dS~ is written
        if (thread_index() % kGroupThreads == 0) {
          const int place = received_place<kSlices>(i, j);
          const uint32_t full = address_in(&s.received_full[place], 1 - rank);
          arrive_and_expect(full, kTileBytes);
          bulk_send(address_in(&s.received[place], 1 - rank), &dS, kTileBytes, full);
        }
      }
      wait(&s.full[slice.stage], slice.parity);
      sums.add(values.S, x[j]);
      fence_for_products();  // for the copies
      if (strong) scale_rows(x[j], {middle(0), middle(1)});
      begin_products();
#pragma unroll
      for (int t = 0; t < 4; ++t)
        product<Contiguous::kOther, Contiguous::kOther>(x[j], sixteen_rows(queries.q, t, 0),
                                                        sixteen_rows(values.d_o, t, 0));
      commit_products();
      wait_for_products<0>();
      arrive(&s.empty[slice.stage]);
      slice.next();
      state_stage.next();
    }
    store_sums(sums, queries.states(rank), factors[kEnter][rank], s.factors);
    fence_for_products();  // before the next chunk's bulk copies
    arrive(&s.states_full[i % kQueryStages]);
  }
  if (!F::ends(segment) || p.dh0 == nullptr) return;
  const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
  __syncwarp();  // s.factors is written
  const float out[2] = {s.factors[Lane().row], s.factors[Lane().row + 8]};
#pragma unroll
  for (int j = 0; j < kSlices; ++j) {
    scale_rows(x[j], out);
    State<kTile> state(j, first_k, 0);
#pragma unroll
    for (int e = 0; e < 32; ++e) state.x[e] = x[j][e];
    state.store(p, p.dh0 + (segment.n * p.H + segment.head) * matrix, p.state_v_first);
  }
}

}  // namespace gla_ext::cuda::sm90::gradients::sweep
