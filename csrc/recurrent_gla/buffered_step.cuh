// The second kernel of a step with buffers, for the state types of buffered_step.cu,
// buffered_step_bf16.cu and buffered_step_fp16.cu:
//   o_t = Sᵀ q^_t + Σ_{j <= t} A_tj v_j      and before, if the new tokens do not fit in the
//   buffer, S = a_0 .. a_{n-1} ⊙ S + Σ_j k~_j v_jᵀ   which empties it
//
// grid    (head and kValues values, row); a block copies all keys of these values to shared memory,
//         16 bytes at a time, before the first kernel is done
// reads   q^, A, k~ of the first kernel, v [B, T, HK, V], buffer v [P, L, HK, V], state
//         [P, H, K, V] or v-first
// writes  o [B, T, H, V], v to the buffer, and the state where it is folded
// Sums are made in fp32. o is made of the rounded state, which a later step will read. Every sum's
// order depends on K, the layout, the state's dtype and whether T is 1.
#pragma once

#include "buffered.cuh"
#include "buffered_state.cuh"
#include "cuda/device/capability.h"
#include "cuda/device/dynamic_shared.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "drafts.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// The tokens' v in fp32 in shared memory: of `held` tokens of the buffer and of `added` new ones.
// Of a fold, the first T places have been saved if heads share v. Places without a token are zero.
template <class Tile, Access kAccess, class Shared>
__device__ __forceinline__ void load_values(const Recurrence& p, const Buffers& b,
                                            const BufferRow& row, int first_value, int held,
                                            int added, Shared& s) {
  constexpr int kFours = Tile::kValues / 4, kAll = kMostBuffered * kFours;
  constexpr int kLoads = (kAll + Tile::kThreads - 1) / Tile::kThreads;
  const int T = static_cast<int>(p.T);
  const int saved = row.folds && added == 0 && b.group != 1 ? T : 0;
  // Calls f(load, token, value) for this thread's fours.
  const auto for_fours = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int x = i * Tile::kThreads + static_cast<int>(threadIdx.x);
      if (kAll % Tile::kThreads != 0 && x >= kAll) break;
      f(i, x / kFours, x % kFours * 4);
    }
  };
  FourBits<kAccess> bits[kLoads];
  for_fours([&](int i, int j, int value) {
    Rows from;
    from.dtype = j < saved ? DType::kFloat : p.v.dtype;
    int64_t of = first_value + value;
    if (j < saved)
      from.data = b.values, of += (row.keys(b) * T + j) * p.V;
    else if (j < held)
      from.data = b.v.data, of += row.buffer_offset(b.v, j);
    else
      from.data = p.v.data, of += row.offset(p.v, j - held);
    bits[i] = FourBits<kAccess>(from, of, j < held + added ? p.V - first_value - value : 0);
  });
  for_fours([&](int i, int j, int value) {
    *reinterpret_cast<float4*>(&s.v[j][value]) =
        bits[i].map(j < saved ? DType::kFloat : p.v.dtype, [](float y) { return y; });
  });
}

// Starts to copy k~ and its decay; 0 from Kp on.
template <class Tile, class Shared>
__device__ __forceinline__ void load_fold_keys(const Recurrence& p, const Buffers& b,
                                               const BufferRow& row, Shared& s) {
  const float* from = b.keys + row.keys(b) * kFoldRows * b.Kp;
#pragma unroll 2
  for (int i = threadIdx.x; i < kFoldRows * Tile::kK / 4; i += Tile::kThreads) {
    const int j = i / (Tile::kK / 4), key = i % (Tile::kK / 4) * 4;
    sm90::copy16(sm90::shared_address(&s.keys[j][key]), from + j * b.Kp + key, key < b.Kp);
  }
  sm90::commit_copies();
}

// o of at most kQueries tokens from `first` on, and their v to the buffer, from place `held` on.
template <class Tile, int kParts, class Shared>
__device__ __forceinline__ void store_outputs(const Recurrence& p, const Buffers& b,
                                              const BufferRow& row, int first, int first_value,
                                              int held, const Shared& s) {
  const int tokens = min(static_cast<int>(p.T) - first, kQueries);
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * Tile::kValues; i += Tile::kThreads) {
    const int t = i / Tile::kValues, j = i % Tile::kValues, value = first_value + j;
    if (value >= p.V) continue;
    const int last = held + first + t;
    float o = s.o[t][0][j];
#pragma unroll
    for (int part = 1; part < kParts; ++part) o += s.o[t][part][j];
#pragma unroll
    for (int token = 0; token < kMostBuffered; ++token)
      if (token <= last) o = fmaf(s.A[t][token], s.v[token][j], o);
    store_any(p.o.data, p.o.dtype, row.offset(p.o, first + t) + value, o);
    if (row.owns_keys(b))
      store_any(b.v.data, b.v.dtype, row.buffer_offset(b.v, last) + value, s.v[last][j]);
  }
}

// Blocks of a multiprocessor for which there are registers, and above 256 keys shared memory.
// Compilers for other GPUs than 9.0 need more registers.
constexpr int kMostBufferedBlocks = kMajor == 0 || kMajor == 9 ? 4 : 3;
template <class Tile, Access kAccess>
constexpr int kBufferedBlocks =
    Tile::kThreads > 256                                    ? 1
    : kAccess == Access::kGeneral                           ? 2
    : Tile::kK == 512 || (Tile::kC == 8 && Tile::kK == 128) ? 3
                                                            : kMostBufferedBlocks;

// kOne: a call of a single token.
template <class State, class Tile, Access kAccess, bool kOne>
__global__ void __launch_bounds__(Tile::kThreads, (kBufferedBlocks<Tile, kAccess>))
    buffered_outputs_kernel(const __grid_constant__ Recurrence p,
                            const __grid_constant__ Buffers b) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BufferedShared<State, Tile>*>(s_bytes);
  using Part = BufferedState<Tile, State, kAccess>;
  const int tile = blockIdx.x & ((1 << b.tile_bits) - 1), first_value = tile * Tile::kValues;
  if (first_value >= p.V || row_of_block() >= p.B) return sm90::await_previous_kernel();
  const BufferRow row(p, b, row_of_block(), blockIdx.x >> b.tile_bits);
  const int T = static_cast<int>(p.T), Kp = b.Kp;
  if (row.slot < 0) {
    sm90::await_previous_kernel();
#pragma unroll 1
    for (int i = threadIdx.x; i < T * Tile::kValues; i += Tile::kThreads) {
      const int value = first_value + i % Tile::kValues;
      if (value < p.V)
        store_any(p.o.data, p.o.dtype, row.offset(p.o, i / Tile::kValues) + value, 0.f);
    }
    return;
  }
  State* matrix =
      static_cast<State*>(p.state_out) + row.slot * p.state_stride_n + row.head * p.state_stride_h;
  Part::load(p, matrix, first_value, s);
  int held = row.held;
  bool folds = row.folds;
  if (folds && b.group != 1) sm90::await_previous_kernel();  // the first kernel saves values
#pragma unroll 1
  for (;; held = 0, folds = false) {
    load_values<Tile, kAccess>(p, b, row, first_value, held, folds ? 0 : T, s);
    sm90::await_previous_kernel();
    if (!folds) break;
    load_fold_keys<Tile>(p, b, row, s);
    Part::wait();
    __syncthreads();  // everything has been copied
    Part::fold(p, matrix, first_value, p.v.dtype != DType::kFloat, s);
    __syncthreads();  // v and the keys have been read
  }
#pragma unroll 1
  for (int first = 0; first < T; first += kQueries) {
    if (first > 0) __syncthreads();  // A and o have been read
    const int64_t query = int64_t{row.run} * T + first;
    const int tokens = min(T - first, kQueries);
    for (int i = threadIdx.x; i < tokens * kMostBuffered / 4; i += Tile::kThreads)
      sm90::copy16(sm90::shared_address(&s.A[0][4 * i]), b.scores + query * kMostBuffered + 4 * i,
                   true);
    sm90::commit_copies();
    if constexpr (kOne) {
      Part::multiply_one(b.queries + query * Kp, Kp, s);
    } else {
      const typename Part::Queries q(b.queries + query * Kp, Kp, tokens);
      Part::wait();
      __syncthreads();  // everything has been copied
      Part::multiply(q, tokens, s);
    }
    __syncthreads();  // o of every part is written
    store_outputs<Tile, kOne ? Tile::kParts : Tile::kWarps>(p, b, row, first, first_value, held, s);
  }
}

template <class State, class Tile, Access kAccess, bool kOne>
void launch_buffered_outputs(const Recurrence& p, Buffers b, bool overlaps, cudaStream_t stream) {
  constexpr auto kernel = buffered_outputs_kernel<State, Tile, kAccess, kOne>;
  constexpr size_t kBytes = sizeof(BufferedShared<State, Tile>);
  static_assert(kBytes <= (Tile::kK > kMostBufferedKeys ? kManyKeysBytes : kSharedOfEveryGpu));
  static const DynamicShared shared(kernel, kBytes);
  shared.allow();
  while (Tile::kValues << b.tile_bits < p.V) ++b.tile_bits;
  const dim3 blocks = blocks_of_rows(p.H << b.tile_bits, p.B);
  if (overlaps)
    sm90::launch_dependent(kernel, blocks, Tile::kThreads, kBytes, stream, p, b);
  else
    kernel<<<blocks, Tile::kThreads, kBytes, stream>>>(p, b);
}

// Whether every 16 bytes of a row of the state are aligned, and every four values of a token.
template <class State>
bool has_aligned_pieces(const Recurrence& p, const Buffers& b) {
  constexpr int kC = 16 / sizeof(State);
  const int64_t columns = p.state_v_first ? p.K : p.V;
  return p.state_aligned && p.v.aligned && b.v.aligned && p.V % 4 == 0 && columns % kC == 0 &&
         p.state_stride_n % kC == 0 && p.state_stride_h % kC == 0;
}

template <class State, class Tile>
void launch_buffered_outputs(const Recurrence& p, const Buffers& b, bool overlaps,
                             cudaStream_t stream) {
  if (!has_aligned_pieces<State>(p, b))
    launch_buffered_outputs<State, Tile, Access::kGeneral, false>(p, b, overlaps, stream);
  else if (p.T == 1)
    launch_buffered_outputs<State, Tile, Access::kFast, true>(p, b, overlaps, stream);
  else
    launch_buffered_outputs<State, Tile, Access::kFast, false>(p, b, overlaps, stream);
}

template <class State>
void launch_buffered_outputs(const Recurrence& p, const Buffers& b, bool overlaps,
                             cudaStream_t stream) {
  with_keys(p.K < 128 ? 128 : p.K, [&](auto keys) {
    constexpr int kK = decltype(keys)::value;
    if constexpr (kK >= 128) {
      if (p.state_v_first)
        launch_buffered_outputs<State, BufferedTile<State, kK, true>>(p, b, overlaps, stream);
      else
        launch_buffered_outputs<State, BufferedTile<State, kK, false>>(p, b, overlaps, stream);
    }
  });
}

}  // namespace recurrent
}  // namespace gla_ext::cuda
