// The outputs of drafted tokens by the chunk form, for the state types of verify.cu, verify_bf16.cu
// and verify_fp16.cu. The state is read once and not written: o_i = b_0 .. b_i ⊙ Sᵀ q^_i + Σ_{j≤i}
// A_ij (b_{j+1} .. b_i ⊙ v_j), with q^ and A of drafts.cuh.
//
// grid    (row of a pool, head, some tiles of 32 values); a tile with all its keys at a time
//         (above 512: with the keys of a turn), 32 keys a warp, while the next tile is loaded, 16
//         bytes at a time if rows are aligned
// reads   q, k, gk [B, T, H, K], v, gv [B, T, H, V], state_in [.., H, K, V] or v-first
// writes  o [B, T, H, V]
// Decays are running products, exact at a reset. Everything is accumulated in fp32, except sums of
// 32 keys, which tensor cores make. The order of every sum depends only on K, so a token has the
// same bits in any batch, any pool and drafts of any length.
#pragma once

#include <algorithm>

#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "state_product.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// Above 512 keys a block takes 256 a turn, for all of its tiles, whose sums it keeps in between; so
// it has few tiles.
template <int kK>
constexpr int kKeys = kK > 512 ? 256 : kK;
constexpr int kMostTiles = 8;

// sums: of a tile, over the keys of earlier turns, [kDrafts, kTileValues].
struct Turn {
  bool is_first, is_last;
  float (*sums)[kTileValues];
};

// The starts of every token's rows, computed once and not for every tile.
struct RowStarts {
  int64_t v[kDrafts], gv[kDrafts], o[kDrafts];
  int tokens;

  __device__ __forceinline__ void find(const Recurrence& p, const Run& run) {
    if (threadIdx.x >= kDrafts) return;
    const int t = threadIdx.x;
    tokens = static_cast<int>(run.length);
    v[t] = draft_offset(p.v, run, t);
    gv[t] = draft_offset(p.gv, run, t);
    o[t] = draft_offset(p.o, run, t);
  }
};

// The data of a tile that warps exchange.
template <int kK>
struct alignas(16) Stage {
  static constexpr int kPitch = kTileValues + 4;  // the lanes of a store use different banks
  float sums[kWarps<kK>][kDrafts][kPitch];
  float v[kDrafts][kTileValues], b[kDrafts][kTileValues];  // v, exp gv

  template <bool kVFirst>
  __device__ __forceinline__ void put(const Sums& x, int T) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (8 * n >= T) break;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float* to = sums[threadIdx.x / 32][8 * n + 2 * column_of_lane() + e];
        if constexpr (kVFirst) {
#pragma unroll
          for (int i = 0; i < 4; ++i) to[8 * i + row_of_lane()] = x[i / 2][n][i % 2 * 2 + e];
        } else {
          *reinterpret_cast<float4*>(to + 4 * row_of_lane()) =
              make_float4(x[0][n][e], x[0][n][2 + e], x[1][n][e], x[1][n][2 + e]);
        }
      }
    }
  }

  // A warp has kEach tokens; a lane has kEach values of one of them.
  static constexpr int kEach = kDrafts / kWarps<kK>, kLanes = 32 / kEach;
  struct alignas(4 * kEach) Values {
    float x[kEach];
  };
  __device__ __forceinline__ static Values values_at(const float* row) {
    return *reinterpret_cast<const Values*>(row + threadIdx.x % kLanes * kEach);
  }
  __device__ __forceinline__ static void add(Values& to, const Values& x) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) to.x[e] += x.x[e];
  }

  __device__ __forceinline__ void write_outputs(const Recurrence& p, int T, const RowStarts& starts,
                                                const Scores<kK>& scores, int first_value,
                                                const Turn& turn) const {
    const int first = static_cast<int>(threadIdx.x) / 32 * kEach;
    const int i = first + static_cast<int>(threadIdx.x) % 32 / kLanes;
    if (i >= T) return;
    Values o = values_at(sums[0][i]);
#pragma unroll
    for (int w = 1; w < kWarps<kK>; ++w) add(o, values_at(sums[w][i]));
    if (!turn.is_first) add(o, values_at(turn.sums[i]));
    if (!turn.is_last) {
      *reinterpret_cast<Values*>(turn.sums[i] + threadIdx.x % kLanes * kEach) = o;
      return;
    }
    const Values inside = p.gv.data != nullptr ? decayed_sums<true>(scores, first, i, o)
                                               : decayed_sums<false>(scores, first, i, o);
    const int value = first_value + static_cast<int>(threadIdx.x) % kLanes * kEach;
    const int64_t to = starts.o[i] + value;
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (value + e < p.V) store_any(p.o.data, p.o.dtype, to + e, o.x[e] + inside.x[e]);
  }

 private:
  // Returns Σ_{j≤i} A_ij v_j with each term decayed to token i. Also decays `o`, the part from
  // before token 0.
  template <bool kValueGates>
  __device__ __forceinline__ Values decayed_sums(const Scores<kK>& scores, int first, int i,
                                                 Values& o) const {
    const float* A = scores.parts[0] + scores.pair(i, 0);
    Values sum, decay;
#pragma unroll
    for (int e = 0; e < kEach; ++e) sum.x[e] = 0, decay.x[e] = 1;
#pragma unroll 4
    for (int j = first + kEach - 1; j >= 0; --j) {
      if (j > i) continue;
      const Values v_j = values_at(v[j]);
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        sum.x[e] = fmaf(A[j], kValueGates ? decay.x[e] * v_j.x[e] : v_j.x[e], sum.x[e]);
      if constexpr (kValueGates) {
        const Values b_j = values_at(b[j]);
#pragma unroll
        for (int e = 0; e < kEach; ++e) decay.x[e] *= b_j.x[e];
      }
    }
    if constexpr (kValueGates) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) o.x[e] *= decay.x[e];
    }
    return sum;
  }
};

// A thread's values of a tile, loaded before they are stored in shared memory. A lane has one value
// of some tokens.
template <int kK>
struct ValueLoads {
  static constexpr int kLoads = kDrafts / kWarps<kK>;
  uint32_t v[kLoads], gv[kLoads];

  __device__ __forceinline__ void load(const Recurrence& p, int T, const RowStarts& starts,
                                       int first_value) {
    const int value = first_value + static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool there = token(i) < T && value < p.V;
      v[i] = load_element(p.v, starts.v[token(i)] + value, there);
      if (p.gv.data != nullptr) gv[i] = load_element(p.gv, starts.gv[token(i)] + value, there);
    }
  }
  __device__ __forceinline__ void store(const Recurrence& p, Stage<kK>& s) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) s.v[token(i)][threadIdx.x % 32] = value_of(v[i], p.v.dtype);
    if (p.gv.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      s.b[token(i)][threadIdx.x % 32] = decay_of(value_of(gv[i], p.gv.dtype));
  }

 private:
  __device__ __forceinline__ static int token(int i) {
    return kWarps<kK> * i + static_cast<int>(threadIdx.x) / 32;
  }
};

template <int kK>
struct Shared {
  Scores<kK> scores;
  RowStarts starts;
  union {
    Drafts<kK> drafts;    // until every warp has loaded its q^
    Stage<kK> stages[2];  // then, one tile after the other
  };
};

__device__ __forceinline__ void write_zeros(const Recurrence& p, const Run& run, int first_value,
                                            int end_value) {
  const int values = (end_value < p.V ? end_value : p.V) - first_value;
  for (int i = threadIdx.x; i < static_cast<int>(run.length) * values; i += blockDim.x)
    store_any(p.o.data, p.o.dtype, draft_offset(p.o, run, i / values) + first_value + i % values,
              0.f);
}

// As many threads as keys of a turn; 512 threads a multiprocessor, as many as registers allow.
// kPacked: the drafts may have any lengths; the kernel takes those of 1 to 16 tokens.
template <class State, bool kVFirst, int kK, Access kAccess, bool kPacked>
__global__ void __launch_bounds__(kKeys<kK>, 512 / kKeys<kK>)
    verify_kernel(Recurrence p, int tiles_of_block) {
  constexpr int kStep = kKeys<kK>;
  extern __shared__ __align__(16) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared<kStep>*>(s_bytes);
  const auto sums_before = reinterpret_cast<float (*)[kDrafts][kTileValues]>(&s + 1);
#pragma unroll 1
  for (int start = 0; start < (kK > kStep ? p.K : kStep); start += kStep) {
    const bool is_first = start == 0, is_last = kK == kStep || start + kStep >= p.K;
    unsigned block = blockIdx.x;
    // Registers are few. So what follows from the block is computed at every turn, and drafts that
    // are not loaded get a value: without one, registers would be kept for them between turns.
    if constexpr (kK > kStep) asm volatile("" : "+r"(block));
    const int tiles = blocks_of(p.V, kTileValues), blocks = blocks_of(tiles, tiles_of_block);
    Run run = find_run(p, block / blocks);
    if constexpr (!kPacked) run.start = 0, run.length = p.T;
    const int first = static_cast<int>(block % blocks) * tiles_of_block;
    const int end = first + tiles_of_block < tiles ? first + tiles_of_block : tiles;
    if (kPacked && (run.length == 0 || run.length > kDrafts)) return;
    if (run.state < 0) return write_zeros(p, run, first * kTileValues, end * kTileValues);

    // The number of tokens of a packed draft is kept in shared memory, since registers are few.
    const auto tokens = [&] { return kPacked ? s.starts.tokens : static_cast<int>(p.T); };
    const int first_key = static_cast<int>(threadIdx.x) / 32 * 32;
    const int value = row_of_lane() * (kVFirst ? 1 : 4);
    const int key_stride = kVFirst ? 1 : p.V, value_stride = kVFirst ? p.K : 1;
    const int key = start + first_key + 4 * column_of_lane();
    const State* from = static_cast<const State*>(p.state_in) + run.state * p.state_stride_n +
                        run.head * p.state_stride_h + key * key_stride + value * value_stride;
    StateFours<State, kVFirst> S[2];
    const auto load_state = [&](int g, int tile) {
      const int first_value = tile * kTileValues;
      S[g].template load<kAccess>(p, from + first_value * value_stride + 16 * g * key_stride,
                                  key + 16 * g, value + first_value);
    };
    {
      const int T = static_cast<int>(run.length);
      DraftBits<kStep, kAccess> drafts;
      if constexpr (kK > kStep) drafts = {};
      drafts.load(p, run, T, start);
      load_state(0, first);
      load_state(1, first);
      drafts.store(p, T, s.drafts);
      s.starts.find(p, run);
    }
    __syncthreads();  // q, k, a and the starts are written
    score_parts(tokens(), s.drafts, s.scores, is_first);
    __syncthreads();  // the partial sums of A are written, q is read
    gate_queries(tokens(), s.drafts, s.scores, is_last);
    ValueLoads<kStep> values;
    values.load(p, tokens(), s.starts, first * kTileValues);
    __syncwarp();  // q^ of the warp's keys is written
    QueryFours q[2];
    q[0].load(s.drafts, first_key);
    q[1].load(s.drafts, first_key + 16);
    __syncthreads();  // A is written, the drafts are read
    values.store(p, s.stages[0]);

    for (int tile = first; tile < end; ++tile) {
      Stage<kStep>&stage = s.stages[(tile - first) % 2], &next = s.stages[(tile - first + 1) % 2];
      Sums sums;
      S[0].template unpack<kAccess>();
      add_product<true>(sums, S[0], q[0], tokens() > 8);
      if (tile + 1 < end) load_state(0, tile + 1);
      S[1].template unpack<kAccess>();
      add_product<false>(sums, S[1], q[1], tokens() > 8);
      if (tile + 1 < end) load_state(1, tile + 1);
      stage.template put<kVFirst>(sums, tokens());
      __syncthreads();  // this stage is written, the next one is read by all warps
      if (tile + 1 < end) values.load(p, tokens(), s.starts, (tile + 1) * kTileValues);
      stage.write_outputs(p, tokens(), s.starts, s.scores, tile * kTileValues,
                          {is_first, is_last, sums_before[tile - first]});
      if (tile + 1 < end) values.store(p, next);
    }
    if (!is_last) __syncthreads();  // the stages are read, before drafts take their place
  }
}

template <class State, bool kVFirst, int kK, Access kAccess, bool kPacked>
void launch_verify(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  const int64_t runs = count_runs(p);
  const int tiles = blocks_of(p.V, kTileValues);
  constexpr int kOfTokens = 3;
  const int64_t resident = int64_t{multiprocessors} * (512 / kKeys<kK>);
  int tiles_of_block = choose_tiles(runs, tiles, resident, kOfTokens);
  constexpr bool kInParts = kK > kKeys<kK>;
  constexpr size_t kBytes =
      sizeof(Shared<kKeys<kK>>) + (kInParts ? sizeof(float[kMostTiles][kDrafts][kTileValues]) : 0);
  static_assert(kBytes <= kSharedOfEveryGpu);
  if (kInParts) tiles_of_block = std::min(tiles_of_block, kMostTiles);
  const auto blocks = static_cast<unsigned>(runs * blocks_of(tiles, tiles_of_block));
  constexpr auto kernel = verify_kernel<State, kVFirst, kK, kAccess, kPacked>;
  static const DynamicShared shared(kernel, kBytes);
  shared.allow();
  kernel<<<blocks, kKeys<kK>, kBytes, stream>>>(p, tiles_of_block);
}

template <class State, bool kVFirst, int kK, Access kAccess>
void launch_verify(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  if (p.cu_seqlens.data != nullptr)
    launch_verify<State, kVFirst, kK, kAccess, true>(p, multiprocessors, stream);
  else
    launch_verify<State, kVFirst, kK, kAccess, false>(p, multiprocessors, stream);
}

template <class State, bool kVFirst, int kK>
void launch_verify(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  bool fast = p.state_aligned && p.K % 4 == 0;
  for (const Rows* r : {&p.q, &p.k, &p.gk}) fast &= r->data == nullptr || r->aligned;
  if (fast)
    launch_verify<State, kVFirst, kK, Access::kFast>(p, multiprocessors, stream);
  else
    launch_verify<State, kVFirst, kK, Access::kGeneral>(p, multiprocessors, stream);
}

template <class State, int kK>
void launch_verify(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  if (p.state_v_first)
    launch_verify<State, true, kK>(p, multiprocessors, stream);
  else
    launch_verify<State, false, kK>(p, multiprocessors, stream);
}

template <class State>
void launch_verify(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  if (p.K <= 128) return launch_verify<State, 128>(p, multiprocessors, stream);
  if (p.K <= 256) return launch_verify<State, 256>(p, multiprocessors, stream);
  if (p.K <= 512) return launch_verify<State, 512>(p, multiprocessors, stream);
  launch_verify<State, 1024>(p, multiprocessors, stream);
}

}  // namespace recurrent
}  // namespace gla_ext::cuda
