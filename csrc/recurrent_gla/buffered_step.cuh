// The second kernel of a step with buffers, for the state types of buffered_step.cu,
// buffered_step_bf16.cu and buffered_step_fp16.cu:
//   o_t = Sᵀ q^_t + Σ_{j <= t} A_tj v_j      and before, if the new tokens do not fit in the
//   buffer, S = a_0 .. a_{n-1} ⊙ S + Σ_j k~_j v_jᵀ   which empties it
//
// grid    (row, head, kValues values); a block copies all keys of these values to shared memory, 16
//         bytes at a time, before the first kernel is done
// reads   q^, A, k~ of the first kernel, v [B, T, HK, V], buffer v [P, L, HK, V], state
//         [P, H, K, V] or v-first
// writes  o [B, T, H, V], and the state where it is folded
// Sums are made in fp32. o is made of the rounded state, which a later step will read. Every sum's
// order depends on K, V, the layout and whether T is 1.
#pragma once

#include "buffered.cuh"
#include "buffered_state.cuh"
#include "cuda/device/dynamic_shared.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// The tokens' v in fp32 in shared memory: in a fold those of the buffer, else also the new ones.
// Places without a token are zero.
template <class Tile, class Shared>
__device__ __forceinline__ void load_values(const Recurrence& p, const Buffers& b,
                                            const BufferRow& row, int first_value, int held,
                                            bool folds, Shared& s) {
  constexpr int kLoads = kMostBuffered * Tile::kValues / Tile::kThreads;
  const int T = static_cast<int>(p.T);
  uint32_t bits[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int x = i * Tile::kThreads + static_cast<int>(threadIdx.x);
    const int j = x / Tile::kValues, value = first_value + x % Tile::kValues;
    const bool inside = value < p.V;
    bits[i] = 0;
    if (folds && j < T) {
      if (inside && j < held)
        bits[i] = __float_as_uint(b.values[(int64_t{row.keys} * T + j) * p.V + value]);
    } else if (j < held) {
      bits[i] = load_bits(b.v, row.buffer_offset(b.v, j) + value, inside);
    } else if (!folds && j < held + T) {
      bits[i] = load_bits(p.v, row.offset(p.v, j - held) + value, inside);
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int x = i * Tile::kThreads + static_cast<int>(threadIdx.x);
    const int j = x / Tile::kValues;
    s.v[s.v_index(j, x % Tile::kValues)] =
        value_of(bits[i], folds && j < T ? DType::kFloat : p.v.dtype);
  }
}

template <class Tile, int kK, int kT, class Shared>
__device__ __forceinline__ void load_queries(const Recurrence& p, const Buffers& b,
                                             const BufferRow& row, int first, Shared& s) {
  const int T = static_cast<int>(p.T), Kp = padded_keys(p.K);
#pragma unroll 2
  for (int i = threadIdx.x; i < kT * kK; i += Tile::kThreads) {
    const int t = i / kK, key = i % kK;
    const bool there = first + t < T && key < p.K;
    s.q[t][s.query_index(key)] =
        there ? b.queries[(int64_t{row.run} * T + first + t) * Kp + key] : 0.f;
  }
  for (int i = threadIdx.x; i < kT * kMostBuffered; i += Tile::kThreads) {
    const int t = i / kMostBuffered;
    s.A[t][i % kMostBuffered] =
        first + t < T ? b.scores[(int64_t{row.run} * T + first) * kMostBuffered + i] : 0.f;
  }
}

// k~ and its decay; 0 from Kp on.
template <class Tile, int kK, class Shared>
__device__ __forceinline__ void load_fold_keys(const Recurrence& p, const Buffers& b,
                                               const BufferRow& row, Shared& s) {
  const int Kp = padded_keys(p.K);
  const float* from = b.keys + int64_t{row.keys} * kFoldRows * Kp;
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

template <class Tile, int kT, class Shared>
__device__ __forceinline__ void store_outputs(const Recurrence& p, const BufferRow& row, int first,
                                              int first_value, int held, const Shared& s) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kT * Tile::kValues; i += Tile::kThreads) {
    const int t = i / Tile::kValues, j = i % Tile::kValues, value = first_value + j;
    if (first + t >= p.T || value >= p.V) continue;
    float o = s.o[t][0][j];
#pragma unroll
    for (int part = 1; part < Tile::kParts; ++part) o += s.o[t][part][j];
#pragma unroll 4
    for (int token = 0; token <= held + first + t; ++token)
      o = fmaf(s.A[t][token], s.v[s.v_index(token, j)], o);
    store_any(p.o.data, p.o.dtype, row.offset(p.o, first + t) + value, o);
  }
}

// kT: tokens whose outputs are made at once.
template <class State, class Tile, int kK, Access kAccess, int kT>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kThreads > 256 ? 1 : 2)
    buffered_outputs_kernel(const __grid_constant__ Recurrence p,
                            const __grid_constant__ Buffers b) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BufferedShared<Tile, kT>*>(s_bytes);
  using Part = BufferedState<Tile, State, kAccess>;
  const int tiles = blocks_of(p.V, Tile::kValues);
  const int first_value = static_cast<int>(blockIdx.x % tiles) * Tile::kValues;
  const BufferRow row(p, b, blockIdx.x / tiles);
  const int T = static_cast<int>(p.T);
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
  if (!row.folds) load_values<Tile>(p, b, row, first_value, row.held, /*folds=*/false, s);
  sm90::await_previous_kernel();
  if (row.folds) {
    load_values<Tile>(p, b, row, first_value, row.held, /*folds=*/true, s);
    load_fold_keys<Tile, kK>(p, b, row, s);
    Part::wait();
    __syncthreads();  // v and the keys are written
    Part::fold(p, matrix, first_value, s);
    __syncthreads();  // v and the keys have been read
    load_values<Tile>(p, b, row, first_value, 0, /*folds=*/false, s);
  }
  const int held = row.folds ? 0 : row.held;
#pragma unroll 1
  for (int first = 0; first < T; first += kT) {
    load_queries<Tile, kK, kT>(p, b, row, first, s);
    Part::wait();
    __syncthreads();  // q, A and v are written
    Part::template multiply<kT>(s);
    __syncthreads();  // o of every part is written
    store_outputs<Tile, kT>(p, row, first, first_value, held, s);
    if constexpr (kT > 1) __syncthreads();  // q, A and o have been read
  }
}

template <class State, class Tile, int kK, Access kAccess, int kT>
void launch_buffered_outputs(const Recurrence& p, const Buffers& b, bool overlaps,
                             cudaStream_t stream) {
  constexpr auto kernel = buffered_outputs_kernel<State, Tile, kK, kAccess, kT>;
  constexpr size_t kBytes = sizeof(BufferedShared<Tile, kT>);
  static const DynamicShared shared(kernel, kBytes);
  shared.allow();
  const int64_t blocks = p.B * p.H * blocks_of(p.V, Tile::kValues);
  if (overlaps)
    sm90::launch_dependent(kernel, blocks, Tile::kThreads, kBytes, stream, p, b);
  else
    kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, kBytes, stream>>>(p, b);
}

// Whether every 16 bytes of a row of the state are aligned.
template <class State>
bool has_aligned_pieces(const Recurrence& p) {
  constexpr int kC = 16 / sizeof(State);
  const int64_t columns = p.state_v_first ? p.K : p.V;
  return p.state_aligned && columns % kC == 0 && p.state_stride_n % kC == 0 &&
         p.state_stride_h % kC == 0;
}

template <class State, class Tile, int kK>
void launch_buffered_outputs(const Recurrence& p, const Buffers& b, bool overlaps,
                             cudaStream_t stream) {
  if (!has_aligned_pieces<State>(p))
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
