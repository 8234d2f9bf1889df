// The second kernel of a step with buffers, for the state types of buffered_step.cu,
// buffered_step_bf16.cu and buffered_step_fp16.cu:
//   o_t = Sᵀ q^_t + Σ_{j <= t} A_tj v_j      and before, if the new tokens do not fit in the
//   buffer, S = a_0 .. a_{n-1} ⊙ S + Σ_j k~_j v_jᵀ   which empties it
//
// grid    (row, head, kValues values); a block copies all keys of these values to shared memory, 16
//         bytes at a time, before the first kernel is done
// reads   q^, A, k~ of the first kernel, v [B, T, HK, V], buffer v [P, L, HK, V], state
//         [P, H, K, V] or v-first
// writes  o [B, T, H, V], v to the buffer, and the state where it is folded
// Sums are made in fp32. o is made of the rounded state, which a later step will read. Every sum's
// order depends on K, the layout, the state's dtype and whether T is 1.
#pragma once

#include "buffered.cuh"
#include "buffered_state.cuh"
#include "cuda/device/dynamic_shared.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "drafts.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// The tokens' v in fp32 in shared memory: of `held` tokens of the buffer and of `added` new ones.
// Of a fold, the first T places have been saved. Places without a token are zero.
template <class Tile, Access kAccess, class Shared>
__device__ __forceinline__ void load_values(const Recurrence& p, const Buffers& b,
                                            const BufferRow& row, int first_value, int held,
                                            int added, Shared& s) {
  constexpr int kFours = Tile::kValues / 4, kAll = kMostBuffered * kFours;
  constexpr int kLoads = (kAll + Tile::kThreads - 1) / Tile::kThreads;
  const int T = static_cast<int>(p.T), saved = row.folds && added == 0 ? T : 0;
  // Calls f(load, token, value) for this thread's fours. Lanes have neighbouring fours, or if
  // values are rows in shared memory, neighbouring tokens.
  const auto for_fours = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int x = i * Tile::kThreads + static_cast<int>(threadIdx.x);
      if (kAll % Tile::kThreads != 0 && x >= kAll) break;
      if (Tile::kVFirst)
        f(i, x % kMostBuffered, x / kMostBuffered * 4);
      else
        f(i, x / kFours, x % kFours * 4);
    }
  };
  FourBits<kAccess> bits[kLoads];
  for_fours([&](int i, int j, int value) {
    Rows from;
    from.dtype = j < saved ? DType::kFloat : p.v.dtype;
    int64_t of = first_value + value;
    if (j < saved)
      from.data = b.values, of += (row.keys(p, b) * T + j) * p.V;
    else if (j < held)
      from.data = b.v.data, of += row.buffer_offset(b.v, j);
    else
      from.data = p.v.data, of += row.offset(p.v, j - held);
    bits[i] = FourBits<kAccess>(from, of, j < held + added ? p.V - first_value - value : 0);
  });
  for_fours([&](int i, int j, int value) {
    const float4 v = bits[i].map(j < saved ? DType::kFloat : p.v.dtype, [](float y) { return y; });
    if constexpr (Tile::kVFirst) {
      s.v[s.v_index(j, value)] = v.x, s.v[s.v_index(j, value + 1)] = v.y;
      s.v[s.v_index(j, value + 2)] = v.z, s.v[s.v_index(j, value + 3)] = v.w;
    } else {
      *reinterpret_cast<float4*>(&s.v[s.v_index(j, value)]) = v;
    }
  });
}

// k~ and its decay; 0 from Kp on.
template <class Tile, int kK, class Shared>
__device__ __forceinline__ void load_fold_keys(const Recurrence& p, const Buffers& b,
                                               const BufferRow& row, Shared& s) {
  const int Kp = b.Kp;
  const float* from = b.keys + row.keys(p, b) * kFoldRows * Kp;
#pragma unroll 2
  for (int i = threadIdx.x; i < kFoldRows * kK / 4; i += Tile::kThreads) {
    const int j = i / (kK / 4), key = i % (kK / 4) * 4;
    const float4 x =
        key < Kp ? *reinterpret_cast<const float4*>(from + j * Kp + key) : make_float4(0, 0, 0, 0);
    if constexpr (Tile::kVFirst) {
      *reinterpret_cast<float4*>(&s.keys[s.key_index(j, key)]) = x;
    } else {
      s.keys[s.key_index(j, key)] = x.x, s.keys[s.key_index(j, key + 1)] = x.y;
      s.keys[s.key_index(j, key + 2)] = x.z, s.keys[s.key_index(j, key + 3)] = x.w;
    }
  }
}

// o, and the new tokens' v to the buffer, from place `held` on.
template <class Tile, int kT, class Shared>
__device__ __forceinline__ void store_outputs(const Recurrence& p, const Buffers& b,
                                              const BufferRow& row, int first, int first_value,
                                              int held, const Shared& s) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kT * Tile::kValues; i += Tile::kThreads) {
    const int t = i / Tile::kValues, j = i % Tile::kValues, value = first_value + j;
    if (first + t >= p.T || value >= p.V) continue;
    const int last = held + first + t;
    float o = s.o[t][0][j];
#pragma unroll
    for (int part = 1; part < Tile::kParts; ++part) o += s.o[t][part][j];
#pragma unroll
    for (int token = 0; token < kMostBuffered; ++token)
      if (token <= last) o = fmaf(s.A[t][token], s.v[s.v_index(token, j)], o);
    store_any(p.o.data, p.o.dtype, row.offset(p.o, first + t) + value, o);
    if (row.owns_keys(p, b))
      store_any(b.v.data, b.v.dtype, row.buffer_offset(b.v, last) + value, s.v[s.v_index(last, j)]);
  }
}

// Blocks of a multiprocessor for which there are registers.
template <class Tile, int kK, int kT>
constexpr int kBufferedBlocks = Tile::kThreads > 256         ? 1
                                : kT > 1                     ? 2
                                : Tile::kC == 8 && kK == 128 ? 3
                                                             : 4;

// kT: tokens whose outputs are made at once.
template <class State, class Tile, int kK, Access kAccess, int kT>
__global__ void __launch_bounds__(Tile::kThreads, (kBufferedBlocks<Tile, kK, kT>))
    buffered_outputs_kernel(const __grid_constant__ Recurrence p,
                            const __grid_constant__ Buffers b) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BufferedShared<Tile, kT>*>(s_bytes);
  using Part = BufferedState<Tile, State, kAccess>;
  const int tiles = blocks_of(p.V, Tile::kValues);
  const int first_value = static_cast<int>(blockIdx.x % tiles) * Tile::kValues;
  const BufferRow row(p, b, blockIdx.x / tiles);
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
  if (!row.folds) load_values<Tile, kAccess>(p, b, row, first_value, row.held, T, s);
  sm90::await_previous_kernel();
  if (row.folds) {
    load_values<Tile, kAccess>(p, b, row, first_value, row.held, 0, s);
    load_fold_keys<Tile, kK>(p, b, row, s);
    Part::wait();
    __syncthreads();  // v and the keys are written
    Part::fold(p, matrix, first_value, p.v.dtype != DType::kFloat, s);
    __syncthreads();  // v and the keys have been read
    load_values<Tile, kAccess>(p, b, row, first_value, 0, T, s);
  }
  const int held = row.folds ? 0 : row.held;
#pragma unroll 1
  for (int first = 0; first < T; first += kT) {
    const int64_t query = int64_t{row.run} * T + first;
    for (int i = threadIdx.x; i < kT * kMostBuffered; i += Tile::kThreads)
      s.A[i / kMostBuffered][i % kMostBuffered] =
          first + i / kMostBuffered < T ? b.scores[query * kMostBuffered + i] : 0.f;
    Part::template multiply<kT>(b.queries + query * Kp, Kp, T - first, s);
    __syncthreads();  // v, A and o of every part are written
    store_outputs<Tile, kT>(p, b, row, first, first_value, held, s);
    if constexpr (kT > 1) __syncthreads();  // A and o have been read
  }
}

template <class State, class Tile, int kK, Access kAccess, int kT>
void launch_buffered_outputs(const Recurrence& p, const Buffers& b, bool overlaps,
                             cudaStream_t stream) {
  constexpr auto kernel = buffered_outputs_kernel<State, Tile, kK, kAccess, kT>;
  constexpr size_t kBytes = sizeof(BufferedShared<Tile, kT>);
  static_assert(kBytes <= (kK > kMostBufferedKeys ? kManyKeysBytes : kSharedOfEveryGpu));
  static const DynamicShared shared(kernel, kBytes);
  shared.allow();
  const int64_t blocks = p.B * p.H * blocks_of(p.V, Tile::kValues);
  if (overlaps)
    sm90::launch_dependent(kernel, blocks, Tile::kThreads, kBytes, stream, p, b);
  else
    kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, kBytes, stream>>>(p, b);
}

// Whether every 16 bytes of a row of the state are aligned, and every four values of a token.
template <class State>
bool has_aligned_pieces(const Recurrence& p, const Buffers& b) {
  constexpr int kC = 16 / sizeof(State);
  const int64_t columns = p.state_v_first ? p.K : p.V;
  return p.state_aligned && p.v.aligned && b.v.aligned && p.V % 4 == 0 && columns % kC == 0 &&
         p.state_stride_n % kC == 0 && p.state_stride_h % kC == 0;
}

template <class State, class Tile, int kK>
void launch_buffered_outputs(const Recurrence& p, const Buffers& b, bool overlaps,
                             cudaStream_t stream) {
  if (!has_aligned_pieces<State>(p, b))
    launch_buffered_outputs<State, Tile, kK, Access::kGeneral, 4>(p, b, overlaps, stream);
  else if (p.T == 1)
    launch_buffered_outputs<State, Tile, kK, Access::kFast, 1>(p, b, overlaps, stream);
  else
    launch_buffered_outputs<State, Tile, kK, Access::kFast, 4>(p, b, overlaps, stream);
}

template <class State>
void launch_buffered_outputs(const Recurrence& p, const Buffers& b, bool overlaps,
                             cudaStream_t stream) {
  with_keys(p.K < 128 ? 128 : p.K, [&](auto keys) {
    constexpr int kK = decltype(keys)::value;
    if constexpr (kK >= 128) {
      if (p.state_v_first)
        launch_buffered_outputs<State, BufferedTile<State, kK, true>, kK>(p, b, overlaps, stream);
      else
        launch_buffered_outputs<State, BufferedTile<State, kK, false>, kK>(p, b, overlaps, stream);
    }
  });
}

}  // namespace recurrent
}  // namespace gla_ext::cuda
