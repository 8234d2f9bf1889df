// A block's part of a state in a step with buffers: its product with queries, and the fold of a
// buffer into it.
#pragma once

#include "cuda/device/vec.cuh"
#include "cuda/sm90/tiles/ptx.cuh"
#include "state_product.cuh"
#include "tile.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// A block has all keys of kValues values: a tile whose rows are keys ([K, V] states) or values ([V,
// K]).
template <class State, int kKeys, bool kVFirst_>
struct BufferedTile {
  static constexpr int kK = kKeys;
  static constexpr bool kVFirst = kVFirst_;
  static constexpr int kThreads = kK > 512 ? 512 : 256, kWarps = kThreads / 32;
  static constexpr int kC = 16 / sizeof(State);  // numbers of a piece, which is copied at once
  static constexpr int kPieces = 8;              // of a thread
  static constexpr int kValues = kPieces * kThreads * kC / kK;
  static constexpr int kRows = kVFirst ? kValues : kK, kColumns = kVFirst ? kK : kValues;
  static constexpr int kRowPieces = kColumns / kC;
  static constexpr int kStep = kThreads / kRowPieces;  // rows between the pieces of a thread
  // Sums over keys that make up an o of a single token.
  static constexpr int kParts = !kVFirst ? kWarps : kRowPieces > 32 ? kRowPieces / 32 : 1;

  // A thread's pieces are those of rows row(), row() + kStep, .. at column().
  __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) / kRowPieces; }
  __device__ __forceinline__ static int column() {
    return static_cast<int>(threadIdx.x) % kRowPieces * kC;
  }

  // Offset of a number in shared memory. The pieces of a row are exchanged, so that lanes that load
  // pairs of numbers of even rows, or of odd ones, use different banks. The offset of the bits of
  // two rows and columns together (|), which have none in common, is that of both (^).
  __device__ __forceinline__ static int place(int row, int column) {
    const int flips = (row / 2 % 4 * 2 + row / 8 % 2) & (kRowPieces - 1);
    return (row * kRowPieces + (column / kC ^ flips)) * kC + column % kC;
  }
  // How many numbers exist from this one on in its row, and its offset in the matrix.
  __device__ __forceinline__ static int valid_of(const Recurrence& p, int first_value, int row,
                                                 int column) {
    if (kVFirst) return first_value + row < p.V ? p.K - column : 0;
    return row < p.K ? p.V - first_value - column : 0;
  }
  __device__ __forceinline__ static int offset_of(const Recurrence& p, int first_value, int row,
                                                  int column) {
    if (kVFirst) return (first_value + row) * p.K + column;
    return row * p.V + first_value + column;
  }
};

constexpr int kQueries = 8;  // tokens whose outputs are made at once

template <class State, class Tile>
struct BufferedShared {
  static constexpr int kPad = 8;  // so that neighbouring tokens are in different banks
  alignas(16) State state[Tile::kRows * Tile::kColumns];
  alignas(16) float v[kMostBuffered][Tile::kValues + kPad];
  alignas(16) float A[kQueries][kMostBuffered];
  union {
    alignas(16) float keys[kFoldRows][Tile::kK + kPad];  // of a fold: k~ and its decay
    float o[kQueries][Tile::kWarps][Tile::kValues];      // after it: every warp's sums over keys
  };

  // Row j of the factor of a fold whose numbers belong to the state's rows, or to its columns.
  __device__ __forceinline__ const float* of_rows(int j) const {
    return Tile::kVFirst ? v[j] : keys[j];
  }
  __device__ __forceinline__ const float* of_columns(int j) const {
    return Tile::kVFirst ? keys[j] : v[j];
  }
};

// A block's part of a state in shared memory.
template <class Tile, class State, Access kAccess>
struct BufferedState {
  using Shared = BufferedShared<State, Tile>;

  // Starts to copy all of it.
  __device__ __forceinline__ static void load(const Recurrence& p, const State* matrix,
                                              int first_value, Shared& s) {
    constexpr int kC = Tile::kC, kStep = Tile::kStep;
    const int row = Tile::row(), column = Tile::column();
    const State* from = matrix + Tile::offset_of(p, first_value, row, column);
    const int64_t step = kStep * (Tile::kVFirst ? p.K : p.V);
    const int own = Tile::place(row, column);
#pragma unroll
    for (int i = 0; i < Tile::kPieces; ++i, from += step) {
      const int valid = Tile::valid_of(p, first_value, row + i * kStep, column);
      State* to = s.state + (own ^ Tile::place(i * kStep, 0));
      if constexpr (kAccess == Access::kFast)
        sm90::copy16(sm90::shared_address(to), from, valid > 0);
      else
        *reinterpret_cast<Vec<State, kC>*>(to) = load_each<State, kC>(from, valid);
    }
    sm90::commit_copies();
  }
  // Until all that this thread copies is there.
  __device__ __forceinline__ static void wait() { sm90::wait_for_copies<0>(); }

  // Folds the buffer, of which s has v, k~ and the decay, and stores the state: S = decay ⊙ S +
  // rows columnsᵀ on tensor cores, 16 rows and columns at a time. A factor is the sum of
  // two tf32 numbers; the product of the low ones is left out, and v of 16 bits (v_is_short) has
  // none.
  __device__ __forceinline__ static void fold(const Recurrence& p, State* matrix, int first_value,
                                              bool v_is_short, Shared& s) {
    constexpr int kWarps = Tile::kWarps, kAcross = Tile::kColumns / 16;
    constexpr int kDown = Tile::kRows / 16, kSide = kAcross < kWarps ? kAcross : kWarps;
    const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool rows_have_low = !(Tile::kVFirst && v_is_short);
    const bool columns_have_low = Tile::kVFirst || !v_is_short;
#pragma unroll 1
    for (int across = warp % kSide; across < kAcross; across += kSide) {
      // Columns of the two products are such that a lane's results are four neighbours.
      float columns[2][2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            columns[half][u][e] =
                s.of_columns(8 * half + 4 * e + t)[16 * across + r / 2 * 4 + 2 * u + r % 2];
      const int column = 16 * across + 4 * t;
#pragma unroll 1
      for (int down = warp / kSide; down < kDown; down += kWarps / kSide) {
        float high[2][4], low[4], sums[2][4]{};
        // Small products first: tensor cores truncate when they add.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const Parts x(s.of_rows(8 * half + 4 * (e / 2) + t)[16 * down + 8 * (e % 2) + r]);
            high[half][e] = x.high, low[e] = x.low;
          }
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            const Parts x(columns[half][u][0]), y(columns[half][u][1]);
            if (rows_have_low) mma(sums[u], low, x.high, y.high);
            if (columns_have_low) mma(sums[u], high[half], x.low, y.low);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            const Parts x(columns[half][u][0]), y(columns[half][u][1]);
            mma(sums[u], high[half], x.high, y.high);
          }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * down + 8 * half + r;
          auto& at = *reinterpret_cast<Four*>(s.state + Tile::place(row, column));
          const Vec<State, 4> S = words_of(at);
          float x[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float decay = s.keys[kMostBuffered][Tile::kVFirst ? column + c : row];
            x[c] = fmaf(decay, S[c], sums[c / 2][2 * half + c % 2]);
          }
          const Vec<State, 4> folded = round_to<State, 4>(x);
          at = four_of(folded);
          store(matrix + Tile::offset_of(p, first_value, row, column), folded,
                Tile::valid_of(p, first_value, row, column));
        }
      }
    }
  }

  // A warp's keys of at most kQueries queries, Kp apart: a lane has two keys of each eight, of
  // query lane / 4.
  struct Queries {
    static constexpr int kKeys = Tile::kK / Tile::kWarps;
    float2 x[kKeys / 16][2];

    __device__ __forceinline__ Queries(const float* q, int Kp, int queries) {
      const int r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        const int key = static_cast<int>(threadIdx.x) / 32 * kKeys + 8 * i + 2 * t;
        x[i / 2][i % 2] =
            r < queries && key < Kp ? *reinterpret_cast<const float2*>(q + r * Kp + key) : float2{};
      }
    }
  };
  // s.o of the first `queries` queries: S times q^ on tensor cores, 16 values at a time. A lane's
  // part of 8 keys are two keys of two values. Small products of 16 keys are added first, then
  // their other ones.
  __device__ __forceinline__ static void multiply(Queries q, int queries, Shared& s) {
    constexpr int kKeys = Queries::kKeys, kSixteens = kKeys / 16, kTiles = Tile::kValues / 16;
    const int r = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    const int own = Tile::kVFirst ? Tile::place(2 * r, warp * kKeys + 2 * t)
                                  : Tile::place(warp * kKeys + 2 * t, 2 * r);
    float sums[kTiles][4]{};
#pragma unroll 1  // for want of registers
    for (int i = 0; i < kSixteens; ++i) {
      const Parts q_parts[2][2]{{Parts(q.x[0][0].x), Parts(q.x[0][0].y)},
                                {Parts(q.x[0][1].x), Parts(q.x[0][1].y)}};
#pragma unroll
      for (int next = 1; next < kSixteens; ++next)
        q.x[next - 1][0] = q.x[next][0], q.x[next - 1][1] = q.x[next][1];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float high[2][4], sum[4]{};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float low[4];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float2 S = Tile::kVFirst
                                 ? pair(s, own ^ Tile::place(0, 16 * i + 8 * half), 16 * tile + e)
                                 : pair(s, own ^ Tile::place(8 * half, 16 * tile), 16 * i + e);
            const Parts x(S.x), y(S.y);  // of two keys, or of two values
            const int second = Tile::kVFirst ? e + 2 : 2 * e + 1, first = Tile::kVFirst ? e : 2 * e;
            high[half][first] = x.high, high[half][second] = y.high;
            low[first] = x.low, low[second] = y.low;
          }
          const Parts(&y)[2] = q_parts[half];
          if constexpr (sizeof(State) == 4) mma(sum, low, y[0].high, y[1].high);
          mma(sum, high[half], y[0].low, y[1].low);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          mma(sum, high[half], q_parts[half][0].high, q_parts[half][1].high);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[tile][e] += sum[e];
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (2 * t + e >= queries) break;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        *reinterpret_cast<float2*>(&s.o[2 * t + e][warp][16 * tile + 2 * r]) =
            make_float2(sums[tile][e], sums[tile][2 + e]);
    }
  }

  // s.o of a single query, by parts. A thread multiplies what it has copied itself, and so waits
  // for no other one.
  __device__ __forceinline__ static void multiply_one(const float* q, int Kp, Shared& s) {
    if constexpr (Tile::kVFirst)
      multiply_value_rows(q, Kp, s);
    else
      multiply_key_rows(q, Kp, s);
  }

 private:
  __device__ __forceinline__ static Vec<State, Tile::kC> piece(const Shared& s, int i) {
    const int at = Tile::place(Tile::row(), Tile::column()) ^ Tile::place(i * Tile::kStep, 0);
    const uint4 x = *reinterpret_cast<const uint4*>(s.state + at);
    return {{x.x, x.y, x.z, x.w}};
  }
  // A thread sums its rows of each column, then lanes of a warp are summed.
  __device__ __forceinline__ static void multiply_key_rows(const float* q, int Kp, Shared& s) {
    constexpr int kC = Tile::kC, kPieces = Tile::kPieces;
    float o[kC]{}, r_q[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int key = Tile::row() + i * Tile::kStep;
      r_q[i] = key < Kp ? q[key] : 0.f;
    }
    wait();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto S = piece(s, i);
#pragma unroll
      for (int c = 0; c < kC; ++c) o[c] = fmaf(r_q[i], S[c], o[c]);
    }
#pragma unroll
    for (int c = 0; c < kC; ++c)
#pragma unroll
      for (int lane = Tile::kRowPieces; lane < 32; lane *= 2)
        o[c] += __shfl_xor_sync(0xffffffffu, o[c], lane);
    if (threadIdx.x % 32 >= Tile::kRowPieces) return;
#pragma unroll
    for (int c = 0; c < kC; c += 4)
      *reinterpret_cast<float4*>(&s.o[0][threadIdx.x / 32][Tile::column() + c]) =
          make_float4(o[c], o[c + 1], o[c + 2], o[c + 3]);
  }
  // A thread sums its columns of each row, then the lanes of a row are summed, at most a warp.
  __device__ __forceinline__ static void multiply_value_rows(const float* q, int Kp, Shared& s) {
    constexpr int kC = Tile::kC, kPieces = Tile::kPieces;
    constexpr int kWidth = Tile::kRowPieces < 32 ? Tile::kRowPieces : 32;
    constexpr int kOfSum = kWidth / kPieces;
    static_assert(kPieces == 8);
    const int lane = threadIdx.x % kWidth, part = threadIdx.x % Tile::kRowPieces / 32;
    float4 r_q[kC / 4];
#pragma unroll
    for (int c = 0; c < kC / 4; ++c)
      r_q[c] = Tile::column() < Kp ? *reinterpret_cast<const float4*>(q + Tile::column() + 4 * c)
                                   : float4{};
    wait();
    float o[kPieces]{};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto S = piece(s, i);
#pragma unroll
      for (int c = 0; c < kC; c += 4) {
        const float x[4]{S[c], S[c + 1], S[c + 2], S[c + 3]};
        o[i] += dot(r_q[c / 4], x);
      }
    }
    reduce_halves<8>(o, kWidth / 2);
    reduce_halves<4>(o, kWidth / 4);
    reduce_halves<2>(o, kWidth / 8);
    float sum = o[0];
#pragma unroll
    for (int mask = kOfSum / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (lane % kOfSum == 0) s.o[0][part][Tile::row() + lane / kOfSum * Tile::kStep] = sum;
  }
  // Two neighbours of the row that is `rows` behind that of `place`.
  __device__ __forceinline__ static float2 pair(const Shared& s, int place, int rows) {
    const State* at = s.state + place + rows * Tile::kColumns;
    if constexpr (sizeof(State) == 4) {
      return *reinterpret_cast<const float2*>(at);
    } else {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(at);
      return make_float2(element_of<State>(&word, 0), element_of<State>(&word, 1));
    }
  }

  // Four numbers of a row, as they are loaded and stored at once.
  using Four = std::conditional_t<sizeof(State) == 4, uint4, uint2>;
  __device__ __forceinline__ static Vec<State, 4> words_of(const Four& x) {
    if constexpr (sizeof(State) == 4)
      return {{x.x, x.y, x.z, x.w}};
    else
      return {{x.x, x.y}};
  }
  __device__ __forceinline__ static Four four_of(const Vec<State, 4>& S) {
    if constexpr (sizeof(State) == 4)
      return make_uint4(S.words[0], S.words[1], S.words[2], S.words[3]);
    else
      return make_uint2(S.words[0], S.words[1]);
  }
  __device__ __forceinline__ static void store(State* to, const Vec<State, 4>& S, int valid) {
    if constexpr (kAccess == Access::kFast) {
      if (valid > 0) __stcs(reinterpret_cast<Four*>(to), four_of(S));
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (c < valid) to[c] = from_float<State>(S[c]);
    }
  }
};

}  // namespace recurrent
}  // namespace gla_ext::cuda
