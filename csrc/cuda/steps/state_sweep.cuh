// Forward step 2 and backward step 3: a sweep over the chunks of a sequence with a block of the
// state (or of its gradient) in registers.
//
//   S' = 2^b_C S + (k 2^(b_C - b))^T v             first chunk first
//   dS = 2^b_C dS' + (scale q 2^b)^T do            last chunk first
//
// grid    (sequence, segment, head, 64 key channels, kColumns values); a block loops over the
//         chunks of a segment, or of a sequence that is not cut
// reads   k v b (b_suffix), and h0 or the state that enters the segment; or q do b, and dht or the
//         gradient of the state that leaves it
// writes  S entering, or dS' leaving, every chunk, and the final state: ht, or dh0
//
// With Problem::summarizes a sweep starts from 0 and writes only what its segment adds to the
// state, or to its gradient, and the segment's decay, for the scan of segments.cu. Sweeps of S
// leave out the last segment, those of dS the first.
//
// With gates on values, the columns of the state decay too, by 2^bv_C, and v and do are already
// multiplied by their decays. The state is fp32. While a chunk is multiplied, the rows of the next
// one are loaded.
#pragma once

#include "cuda/device/capability.h"
#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/states.cuh"

namespace gla_ext::cuda {

// For 8.0 the value-gated sweep in fp32 would spill three registers.
constexpr bool kSavesRegisters = kMajor == 8;
using ChunkIndex = std::conditional_t<kSavesRegisters, int32_t, int64_t>;

// The fields of Problem that a sweep uses.
template <Sweep kSweep>
struct SweepFields {
  static constexpr bool kStates = kSweep == Sweep::kStates;
  static constexpr Decay kDecay = kStates ? Decay::kToEnd : Decay::kFromStart;
  const Rows &y, &x;
  void* states;
  DType dtype;
  __device__ explicit SweepFields(const Problem& p)
      : y(kStates ? p.k : p.q),
        x(kStates ? p.v : p.d_o),
        states(kStates ? p.S : p.dS),
        dtype(kStates ? p.S_dtype : p.dS_dtype) {}

  // Where the scan leaves what a segment starts from; before that, what it adds by itself.
  static __device__ StateMatrix of_segment(const Problem& p, int64_t n, int64_t segment,
                                           int32_t head) {
    return matrix_of(p, kStates ? p.segment_states : p.segment_state_grads,
                     n * p.grid.segments + segment, head);
  }

  // The state from which a sweep of sequence n starts, and the place for the state at its end.
  static __device__ StateMatrix initial(const Problem& p, int64_t n, int32_t head) {
    return kStates ? initial_state(p, n, head) : matrix_of(p, p.dht, n, head);
  }
  static __device__ StateMatrix last(const Problem& p, int64_t n, int32_t head) {
    return kStates ? final_state(p, n, head) : matrix_of(p, p.dh0, n, head);
  }
};

// One chunk's rows, loaded ahead.
template <Access kAccess, class In, Decay kDecay, int kColumns>
struct SweepRows {
  StateOperand<kAccess, In, kDecay> y[kPasses<kTile, kTile>];
  float b_last;  // of channel threadIdx.x
  TileRows<kAccess, In, kColumns> x;
  int length;

  __device__ __forceinline__ void load(const Problem& p, const Rows& y_rows, const Rows& x_rows,
                                       int64_t row, int64_t token, int tokens, int head,
                                       int first_k, int first_v) {
    length = tokens;
    const In* y_base = rows_at<const In>(y_rows, row, token, head);
    const In* x_base = rows_at<const In>(x_rows, row, token, head);
    const float* b = rows_at<const float>(p.b, row, token, head);
    const float* suffix = suffix_at<In>(p, row, token, head);
    for_eights<kTile, kTile>([&](int pass, int r, int column) {
      y[pass].load(p, y_base, y_rows, b, suffix, r, length, first_k + column);
    });
    const int channel = first_k + static_cast<int>(threadIdx.x);
    b_last =
        threadIdx.x < kTile && channel < p.K ? b[token_offset(p.b, length - 1) + channel] : 0.f;
    x.load(x_base, x_rows, length, first_v, p.V);
  }
};

// Shared memory of a sweep of either kind.
template <Access kAccess, class In, int kColumns>
struct SweepShared {
  using Op = Operand<In>;
  static constexpr int kPitchY = kPitch<Op, kTile>, kPitchX = kPitch<Op, kColumns>;
  // With room for it, whole rows of the state are stored by way of shared memory.
  static constexpr bool kStaged = kAccess == Access::kFast && std::is_same_v<Op, bf16>;
  alignas(16) Op y[kTile * kPitchY];                    // [token][K]
  alignas(16) Op x[kTile * kPitchX];                    // [token][V]
  alignas(16) Op state[kStaged ? kTile * kPitchX : 8];  // [K][V]
  alignas(16) float b_last[kTile];                      // [K]
  float b_segment[kTile];                               // [K], the sum of b_last
};

// How many segments of a sequence have a block.
__host__ __device__ inline int64_t swept_segments(const Problem& p) {
  return p.grid.segments > 0 ? p.grid.segments - p.summarizes : 1;
}

// Runs block `index` of a sweep. With gates on values, `bv` are their sums, and s_columns
// [kColumns] is shared memory for a chunk's decays. kCheckpoints: also stores checkpoints.
template <Access kAccess, class In, int kColumns, Sweep kSweep, bool kValueGated = false,
          bool kCheckpoints = false>
__device__ __forceinline__ void sweep(SweepShared<kAccess, In, kColumns>& s, const Problem& p,
                                      int64_t index, const Rows* bv = nullptr,
                                      float* s_columns = nullptr) {
  using Op = Operand<In>;
  using Shared = SweepShared<kAccess, In, kColumns>;
  constexpr Decay kDecay = SweepFields<kSweep>::kDecay;
  constexpr int kPitchY = Shared::kPitchY, kPitchX = Shared::kPitchX;
  constexpr bool kStates = kSweep == Sweep::kStates;
  const SweepFields<kSweep> f(p);
  const int v_blocks = blocks_of(p.V, kColumns), k_blocks = blocks_of(p.K, kTile);
  const int first_v = static_cast<int>(index % v_blocks) * kColumns;
  index /= v_blocks;
  const int first_k = static_cast<int>(index % k_blocks) * kTile;
  index /= k_blocks;
  const auto head = static_cast<int32_t>(index % p.H);
  index /= p.H;
  const int64_t swept = swept_segments(p);
  const auto n = static_cast<int32_t>(index / swept);
  const bool is_cut = p.grid.segments > 0;
  const auto segment = static_cast<int32_t>(index % swept) + (!kStates && p.summarizes);
  const int64_t row = p.grid.packed ? 0 : n;
  const Sequence sequence = find_sequence(p, n);
  const auto all = static_cast<ChunkIndex>((sequence.length + kChunk - 1) / kChunk);
  const auto each = is_cut ? static_cast<ChunkIndex>(p.grid.segment_chunks) : all;
  const ChunkIndex first = segment * each, chunks = all - first < each ? all - first : each;

  const WarpTile<kColumns> warp;
  float acc[2][WarpTile<kColumns>::kN][4];  // [K, V] block of the state
  clear(acc);
  const int matrix = p.K * p.V;
  const StateMatrix initial = p.summarizes ? StateMatrix{}
                              : is_cut     ? f.of_segment(p, n, segment, head)
                                           : f.initial(p, n, head);
  if (initial.data != nullptr) {
    const bool v_first = p.state_v_first && !is_cut;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    initial.with_elements([&](const auto* elements) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < WarpTile<kColumns>::kN; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int k = first_k + warp.m + 16 * i + g + 8 * (e / 2);
            const int v = first_v + warp.n + 8 * j + 2 * t + e % 2;
            if (k < p.K && v < p.V)
              acc[i][j][e] = to_float(elements[v_first ? v * p.K + k : k * p.V + v]);
          }
    });
  }
  const auto write = [&](const StateMatrix& to, bool v_first) {
    if (to.data == nullptr) return;
    to.with_elements([&](auto* elements) {
      for_pairs(acc, [&](int r, int c, float s0, float s1) {
        const int k = first_k + warp.m + r, v = first_v + warp.n + c;
        if (k >= p.K) return;
        if (!v_first) {
          store2<Access::kGeneral>(elements + k * p.V + v, s0, s1, p.V - v);
        } else {
          store2<Access::kGeneral>(elements + v * p.K + k, s0, s0, v < p.V ? 1 : 0);
          store2<Access::kGeneral>(elements + (v + 1) * p.K + k, s1, s1, v + 1 < p.V ? 1 : 0);
        }
      });
    });
  };

  const auto chunk_of = [&](ChunkIndex i) { return first + (kStates ? i : chunks - 1 - i); };
  SweepRows<kAccess, In, kDecay, kColumns> rows;
  float column_decay = 1;  // of value first_v + threadIdx.x
  const auto load = [&](ChunkIndex i) {
    const int64_t done = int64_t{chunk_of(i)} * kChunk, left = sequence.length - done;
    rows.load(p, f.y, f.x, row, sequence.start + done,
              static_cast<int>(left < kChunk ? left : kChunk), head, first_k, first_v);
    if constexpr (kValueGated) {
      const uint32_t thread = kSavesRegisters ? thread_anew() : threadIdx.x;
      const int v = first_v + static_cast<int>(thread);
      if (thread < kColumns && v < p.V)
        column_decay = exp2_ftz(
            rows_at<const float>(*bv, row, sequence.start + done + rows.length - 1, head)[v]);
    }
  };
  const auto last = [&] {
    const bool ends = kStates ? first + chunks == all : first == 0;
    return p.summarizes ? f.of_segment(p, n, segment, head)
           : ends       ? f.last(p, n, head)
                        : StateMatrix{};
  };
  if (threadIdx.x < kTile) s.b_segment[threadIdx.x] = 0;
  // The last chunk's rows are needed only for the state after it.
  const bool wanted = kCheckpoints || last().data != nullptr;
  const ChunkIndex multiplied = wanted ? chunks : chunks - 1;
  if (multiplied > 0) load(0);
  const bool with_suffix = has_suffix<In>(p);
  for (ChunkIndex i = 0; i < chunks; ++i) {
    const int64_t state = ((sequence.first_entry + int64_t{chunk_of(i)}) * p.H + head) * matrix;
    if (threadIdx.x < kTile) {
      s.b_last[threadIdx.x] = rows.b_last;
      if (p.summarizes) s.b_segment[threadIdx.x] += rows.b_last;
    }
    if constexpr (kValueGated)
      if (threadIdx.x < kColumns) s_columns[threadIdx.x] = column_decay;
    if constexpr (Shared::kStaged)
      if (!p.summarizes)
        for_pairs(acc, [&](int r, int c, float s0, float s1) {
          store2<Access::kFast>(s.state + (warp.m + r) * kPitchX + warp.n + c, s0, s1, 2);
        });
    __syncthreads();  // s.b_last and s.state are written
    if (i < multiplied) {
      for_eights<kTile, kTile>([&](int pass, int r, int column) {
        store8(s.y + r * kPitchY + column,
               rows.y[pass].template operands<Op>(p, load8_aligned(s.b_last + column), with_suffix,
                                                  r < rows.length));
      });
      rows.x.store(s.x, takes_tf32<In>(p));
      if (i + 1 < multiplied) load(i + 1);
    }
    if (p.summarizes) {
      // No chunk's state is stored.
    } else if constexpr (Shared::kStaged) {
      bf16* out = static_cast<bf16*>(f.states) + state;
      for_eights<kTile, kColumns>([&](int, int r, int column) {
        const int k = first_k + r, v = first_v + column;
        if (k < p.K && v < p.V)
          store8(out + k * p.V + v, load8_aligned(s.state + r * kPitchX + column));
      });
    } else {
      for_pairs(acc, [&](int r, int c, float s0, float s1) {
        const int k = first_k + warp.m + r, v = first_v + warp.n + c;
        if (k < p.K)
          store2_operands<kAccess, Op>(f.states, f.dtype, state + k * p.V + v, s0, s1, p.V - v);
      });
    }
    if (i == multiplied) break;
    __syncthreads();  // the tiles are written
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int k = warp.m + 16 * m + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * e;
        const float decay = exp2_ftz(s.b_last[k]);
#pragma unroll
        for (int j = 0; j < WarpTile<kColumns>::kN; ++j) {
          if constexpr (kValueGated) {
            const int v = warp.n + 8 * j + static_cast<int>(threadIdx.x) % 4 * 2;
            acc[m][j][2 * e] *= decay * s_columns[v];
            acc[m][j][2 * e + 1] *= decay * s_columns[v + 1];
          } else {
            acc[m][j][2 * e] *= decay;
            acc[m][j][2 * e + 1] *= decay;
          }
        }
      }
    product<Stored::kTransposed, Stored::kAsIs, kPitchY, kPitchX>(acc, s.y + warp.m, s.x + warp.n,
                                                                  kTile, takes_tf32<In>(p));
    __syncthreads();  // the tiles, s.b_last and s.state are read
    if constexpr (kCheckpoints)
      if (const int64_t done = int64_t{chunk_of(i) + 1} * kChunk; done <= sequence.length)
        write(checkpoint_of(p, n, done, head), p.state_v_first);
  }
  write(last(), p.state_v_first && !p.summarizes);
  // The decays of all segments but the last come from the sweep of states.
  const int channel = first_k + static_cast<int>(threadIdx.x);
  if (p.summarizes && first_v == 0 && threadIdx.x < kTile && channel < p.K &&
      (kStates || first + chunks == all))
    p.segment_decays[((n * p.grid.segments + segment) * p.H + head) * p.K + channel] =
        s.b_segment[threadIdx.x];
}

// The number of blocks of one sweep.
template <int kColumns>
__host__ __device__ int64_t sweep_blocks(const Problem& p) {
  return p.grid.N * swept_segments(p) * p.H * blocks_of(p.K, kTile) * blocks_of(p.V, kColumns);
}

// The body of a kernel that is a single sweep.
template <Access kAccess, class In, int kColumns, Sweep kSweep, bool kCheckpoints = false>
__device__ __forceinline__ void one_sweep(const Problem& p) {
  __shared__ SweepShared<kAccess, In, kColumns> shared;
  sweep<kAccess, In, kColumns, kSweep, false, kCheckpoints>(shared, p, blockIdx.x);
}

}  // namespace gla_ext::cuda
