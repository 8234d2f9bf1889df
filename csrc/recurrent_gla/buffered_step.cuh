// The second kernel of a step with buffers, for the state types of buffered_step.cu,
// buffered_step_bf16.cu and buffered_step_fp16.cu:
//   o_t = Sᵀ q^_t + Σ_{j <= t} A_tj v_j      and before, if the new tokens do not fit in the
//   buffer, S = a_0 .. a_{n-1} ⊙ S + Σ_j k~_j v_jᵀ   which empties it
//
// grid    (row, head, kValues values); a block copies all keys of these values to shared memory, 16
//         bytes at a time, before the first kernel is done
// reads   q^, A, k~ of the first kernel, v [B, T, HK, V], buffer v [P, L, HK, V], state [.., H, K,
// V]
//         or v-first
// writes  o [B, T, H, V], and the state where it is folded
// Sums are made in fp32. o is made of the rounded state, which a later step will read. Every sum's
// order depends on K, V, the layout and whether T is 1.
#pragma once

#include "buffered.cuh"
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/vec.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "cuda/sm90/tiles/ptx.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// How a block's threads share all keys of kValues values. A piece is 16 bytes of a row of the
// state.
template <class State, int kK>
struct BufferedTile {
  static constexpr int kThreads = kK > 512 ? 512 : 256;
  static constexpr int kC = 16 / sizeof(State);
  static constexpr int kValues = (kK > 256 ? 8 : 16) * kC;
  static constexpr int kPieces = kK * kValues / (kThreads * kC);
};

// [K, V]: a thread has kC values of every kGroups-th key. A sum over keys has a part of each warp.
template <class State, int kK>
struct BufferedKeyRows : BufferedTile<State, kK> {
  using Base = BufferedTile<State, kK>;
  using Base::kC, Base::kPieces, Base::kThreads, Base::kValues;
  static constexpr bool kVFirst = false;
  static constexpr int kLanes = kValues / kC, kGroups = kThreads / kLanes, kParts = kThreads / 32;

  __device__ __forceinline__ static int value(int) { return threadIdx.x % kLanes * kC; }
  __device__ __forceinline__ static int key(int i) {
    return i * kGroups + static_cast<int>(threadIdx.x) / kLanes;
  }
  __device__ __forceinline__ static int valid(const Recurrence& p, int first_value, int i) {
    return key(i) < p.K ? p.V - first_value - value(i) : 0;
  }
  __device__ __forceinline__ static int offset(const Recurrence& p, int first_value, int i) {
    return key(i) * p.V + first_value + value(i);
  }
};

// [V, K]: a thread has keys of one or two values, in pieces of kC. Neighbouring lanes share a
// value.
template <class State, int kK>
struct BufferedValueRows : BufferedTile<State, kK> {
  using Base = BufferedTile<State, kK>;
  using Base::kC, Base::kPieces, Base::kThreads, Base::kValues;
  static constexpr bool kVFirst = true;
  static constexpr int kAtOnce = 32, kLanes = kThreads / kAtOnce, kParts = 1;
  static constexpr int kOfValue = kK / (kLanes * kC);
  static_assert(kPieces == kOfValue * (kValues / kAtOnce));

  __device__ __forceinline__ static int value(int i) {
    return i / kOfValue * kAtOnce + static_cast<int>(threadIdx.x) / kLanes;
  }
  __device__ __forceinline__ static int key(int i) {
    return (i % kOfValue * kLanes + static_cast<int>(threadIdx.x) % kLanes) * kC;
  }
  __device__ __forceinline__ static int valid(const Recurrence& p, int first_value, int i) {
    return first_value + value(i) < p.V ? p.K - key(i) : 0;
  }
  __device__ __forceinline__ static int offset(const Recurrence& p, int first_value, int i) {
    return (first_value + value(i)) * p.K + key(i);
  }
};

// `state`: a thread reads what it has copied there itself.
template <class Tile, int kK, int kT>
struct BufferedShared {
  uint4 state[Tile::kPieces][Tile::kThreads];
  alignas(16) float v[kMostBuffered][Tile::kValues];
  float A[kT][kMostBuffered];
  union {
    // k~ and its decay: [kK, kFoldPitch], or [kFoldRows, kK] for [V, K] states.
    alignas(16) float keys[kK * (Tile::kVFirst ? kFoldRows : kFoldPitch)];
    // Then the queries, [kK, kT] or [kT, kK], and the parts of o.
    struct {
      alignas(16) float q[kT * kK];
      alignas(16) float o[kT][Tile::kParts][Tile::kValues];
    };
  };
};

// From an address that is a multiple of 16 bytes, or of 8 for two numbers.
template <int kN>
__device__ __forceinline__ void load_floats(float (&x)[kN], const float* from) {
  if constexpr (kN == 2) {
    const float2 y = *reinterpret_cast<const float2*>(from);
    x[0] = y.x, x[1] = y.y;
    return;
  }
#pragma unroll
  for (int i = 0; i + 4 <= kN; i += 4) {
    const float4 y = *reinterpret_cast<const float4*>(from + i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}

// A block's part of a state in shared memory.
template <class Tile, class State, int kK, Access kAccess>
struct BufferedState {
  static constexpr int kC = Tile::kC, kPieces = Tile::kPieces;
  using Piece = Vec<State, kC>;

  // Copies all pieces at once; they are there after `wait`.
  template <class Shared>
  __device__ __forceinline__ static void load(const Recurrence& p, const State* matrix,
                                              int first_value, Shared& s) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const State* from = matrix + Tile::offset(p, first_value, i);
      const int valid = Tile::valid(p, first_value, i);
      if constexpr (kAccess == Access::kFast)
        sm90::copy16(sm90::shared_address(&s.state[i][threadIdx.x]), from, valid > 0);
      else
        put(s, i, load_each<State, kC>(from, valid));
    }
    sm90::commit_copies();
  }
  __device__ __forceinline__ static void wait() { sm90::wait_for_copies<0>(); }

  // Folds the buffer, of which s has v, the decayed keys and their decay, and stores the state.
  template <class Shared>
  __device__ __forceinline__ static void fold(const Recurrence& p, State* matrix, int first_value,
                                              Shared& s) {
    constexpr int kGroup = (Tile::kVFirst ? 16 : 32) / kC;  // pieces at a time
    static_assert(kPieces % kGroup == 0);
#pragma unroll 1
    for (int first = 0; first < kPieces; first += kGroup) {
      float x[kGroup][kC];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const Piece S = piece(s, first + i);
        const int key = Tile::key(first + i);
#pragma unroll
        for (int c = 0; c < kC; ++c) x[i][c] = fold_decay(s, key, c) * S[c];
      }
#pragma unroll 1
      for (int j = 0; j < kMostBuffered; j += kStep) add_tokens<kGroup>(s, first, j, x);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const Piece S = round_to<State, kC>(x[i]);
        put(s, first + i, S);
        State* to = matrix + Tile::offset(p, first_value, first + i);
        const int valid = Tile::valid(p, first_value, first + i);
        if constexpr (kAccess == Access::kFast) {
          if (valid > 0)
            __stcs(reinterpret_cast<uint4*>(to),
                   make_uint4(S.words[0], S.words[1], S.words[2], S.words[3]));
        } else {
#pragma unroll
          for (int c = 0; c < kC; ++c)
            if (c < valid) to[c] = from_float<State>(S[c]);
        }
      }
    }
  }

  // s.o of the queries in s.q.
  template <int kT, class Shared>
  __device__ __forceinline__ static void multiply(Shared& s) {
    if constexpr (Tile::kVFirst)
      multiply_value_rows<kT>(s);
    else
      multiply_key_rows<kT>(s);
  }

 private:
  static constexpr int kStep = (Tile::kVFirst ? 8 : 16) / kC;  // tokens that a fold adds at a time

  template <class Shared>
  __device__ __forceinline__ static Piece piece(const Shared& s, int i) {
    const uint4 x = s.state[i][threadIdx.x];
    return {{x.x, x.y, x.z, x.w}};
  }
  template <class Shared>
  __device__ __forceinline__ static void put(Shared& s, int i, const Piece& S) {
    s.state[i][threadIdx.x] = make_uint4(S.words[0], S.words[1], S.words[2], S.words[3]);
  }
  template <class Shared>
  __device__ __forceinline__ static float fold_decay(const Shared& s, int key, int c) {
    return Tile::kVFirst ? s.keys[kMostBuffered * kK + key + c]
                         : s.keys[key * kFoldPitch + kMostBuffered];
  }

  // x += k~_j v_jᵀ of kStep tokens from j on.
  template <int kGroup, class Shared>
  __device__ __forceinline__ static void add_tokens(const Shared& s, int first, int j,
                                                    float (&x)[kGroup][kC]) {
    if constexpr (Tile::kVFirst) {
#pragma unroll
      for (int jj = j; jj < j + kStep; ++jj)
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const float v = s.v[jj][Tile::value(first + i)];
          float k[kC];
          load_floats(k, &s.keys[jj * kK + Tile::key(first + i)]);
#pragma unroll
          for (int c = 0; c < kC; ++c) x[i][c] = fmaf(k[c], v, x[i][c]);
        }
    } else {
      float v[kStep][kC];
#pragma unroll
      for (int jj = 0; jj < kStep; ++jj) load_floats(v[jj], &s.v[j + jj][Tile::value(0)]);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        float k[kStep];
        load_floats(k, &s.keys[Tile::key(first + i) * kFoldPitch + j]);
#pragma unroll
        for (int jj = 0; jj < kStep; ++jj)
#pragma unroll
          for (int c = 0; c < kC; ++c) x[i][c] = fmaf(k[jj], v[jj][c], x[i][c]);
      }
    }
  }

  template <int kT, class Shared>
  __device__ __forceinline__ static void multiply_key_rows(Shared& s) {
    float o[kT][kC]{};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const Piece S = piece(s, i);
      float q[kT];
      if constexpr (kT == 1)
        q[0] = s.q[Tile::key(i)];
      else
        load_floats(q, &s.q[kT * Tile::key(i)]);
#pragma unroll
      for (int t = 0; t < kT; ++t)
#pragma unroll
        for (int c = 0; c < kC; ++c) o[t][c] = fmaf(q[t], S[c], o[t][c]);
    }
#pragma unroll
    for (int t = 0; t < kT; ++t) {
#pragma unroll
      for (int c = 0; c < kC; ++c)
#pragma unroll
        for (int lane = Tile::kLanes; lane < 32; lane *= 2)
          o[t][c] += __shfl_xor_sync(0xffffffffu, o[t][c], lane);
      if (threadIdx.x % 32 < Tile::kLanes) {
        float* to = &s.o[t][threadIdx.x / 32][Tile::value(0)];
#pragma unroll
        for (int c = 0; c < kC; c += 4)
          *reinterpret_cast<float4*>(to + c) =
              make_float4(o[t][c], o[t][c + 1], o[t][c + 2], o[t][c + 3]);
      }
    }
  }

  template <int kT, class Shared>
  __device__ __forceinline__ static void multiply_value_rows(Shared& s) {
    constexpr int kOfValue = Tile::kOfValue;
#pragma unroll
    for (int first = 0; first < kPieces; first += kOfValue) {
      float o[kT]{};
#pragma unroll
      for (int i = first; i < first + kOfValue; ++i) {
        const Piece S = piece(s, i);
#pragma unroll
        for (int t = 0; t < kT; ++t) {
          float q[kC];
          load_floats(q, &s.q[t * kK + Tile::key(i)]);
#pragma unroll
          for (int c = 0; c < kC; ++c) o[t] = fmaf(q[c], S[c], o[t]);
        }
      }
#pragma unroll
      for (int t = 0; t < kT; ++t) {
#pragma unroll
        for (int lane = 1; lane < Tile::kLanes; lane *= 2)
          o[t] += __shfl_xor_sync(0xffffffffu, o[t], lane);
        if (threadIdx.x % Tile::kLanes == 0) s.o[t][0][Tile::value(first)] = o[t];
      }
    }
  }
};

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
    s.v[j][x % Tile::kValues] = value_of(bits[i], folds && j < T ? DType::kFloat : p.v.dtype);
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
    s.q[Tile::kVFirst ? i : key * kT + t] =
        there ? b.queries[(int64_t{row.run} * T + first + t) * Kp + key] : 0.f;
  }
  for (int i = threadIdx.x; i < kT * kMostBuffered; i += Tile::kThreads) {
    const int t = i / kMostBuffered;
    s.A[t][i % kMostBuffered] =
        first + t < T ? b.scores[(int64_t{row.run} * T + first) * kMostBuffered + i] : 0.f;
  }
}

// k~ and its decay. Rows of [V, K] states are padded_keys(K) apart in memory, and kK here.
template <class Tile, int kK, class Shared>
__device__ __forceinline__ void load_fold_keys(const Recurrence& p, const Buffers& b,
                                               const BufferRow& row, Shared& s) {
  const int Kp = padded_keys(p.K);
  if constexpr (Tile::kVFirst) {
    const auto* from = reinterpret_cast<const float4*>(b.keys + int64_t{row.keys} * kFoldRows * Kp);
#pragma unroll 2
    for (int i = threadIdx.x; i < kFoldRows * Kp / 4; i += Tile::kThreads)
      *reinterpret_cast<float4*>(&s.keys[i / (Kp / 4) * kK + i % (Kp / 4) * 4]) = from[i];
#pragma unroll 1
    for (int i = threadIdx.x; i < kFoldRows * (kK - Kp) / 4; i += Tile::kThreads) {
      const int fours = (kK - Kp) / 4;
      *reinterpret_cast<float4*>(&s.keys[i / fours * kK + Kp + i % fours * 4]) =
          make_float4(0, 0, 0, 0);
    }
  } else {
    const auto* from =
        reinterpret_cast<const float4*>(b.keys + int64_t{row.keys} * kFoldPitch * Kp);
#pragma unroll 2
    for (int i = threadIdx.x; i < kK * kFoldPitch / 4; i += Tile::kThreads)
      *reinterpret_cast<float4*>(&s.keys[4 * i]) =
          i < Kp * kFoldPitch / 4 ? from[i] : make_float4(0, 0, 0, 0);
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
      o = fmaf(s.A[t][token], s.v[token][j], o);
    store_any(p.o.data, p.o.dtype, row.offset(p.o, first + t) + value, o);
  }
}

// kT: tokens whose outputs are made at once.
template <class State, class Tile, int kK, Access kAccess, int kT>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kThreads > 256 ? 1 : 2)
    buffered_outputs_kernel(const __grid_constant__ Recurrence p,
                            const __grid_constant__ Buffers b) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BufferedShared<Tile, kK, kT>*>(s_bytes);
  using Part = BufferedState<Tile, State, kK, kAccess>;
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
  constexpr size_t kBytes = sizeof(BufferedShared<Tile, kK, kT>);
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
        launch_buffered_outputs<State, BufferedValueRows<State, kK>, kK>(p, b, overlaps, stream);
      else
        launch_buffered_outputs<State, BufferedKeyRows<State, kK>, kK>(p, b, overlaps, stream);
    }
  });
}

}  // namespace recurrent
}  // namespace gla_ext::cuda
