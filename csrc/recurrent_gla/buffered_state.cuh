// A block's part of a state in a step with buffers: how threads share it, its product with queries,
// and the fold of a buffer into it.
#pragma once

#include "cuda/device/vec.cuh"
#include "cuda/sm90/tiles/ptx.cuh"
#include "state_product.cuh"
#include "tile.cuh"

namespace gla_ext::cuda {
namespace recurrent {

// A block has all keys of kValues values: a tile whose rows are keys ([K, V] states) or values ([V,
// K]). A thread has a piece, 16 bytes, of every kGroups-th row, all in the same columns.
template <class State, int kK, bool kVFirst_>
struct BufferedTile {
  static constexpr bool kVFirst = kVFirst_;
  static constexpr int kThreads = kK > 512 ? 512 : 256;
  static constexpr int kC = 16 / sizeof(State);
  static constexpr int kPieces = 8;
  static constexpr int kValues = kPieces * kThreads * kC / kK;
  static constexpr int kRows = kVFirst ? kValues : kK, kColumns = kVFirst ? kK : kValues;
  static constexpr int kLanes = kColumns / kC, kGroups = kThreads / kLanes;
  static_assert(kPieces == kRows / kGroups);
  // Sums over keys that make up an o.
  static constexpr int kParts = !kVFirst ? kThreads / 32 : kLanes > 32 ? kLanes / 32 : 1;

  __device__ __forceinline__ static int row(int i) {
    return i * kGroups + static_cast<int>(threadIdx.x) / kLanes;
  }
  __device__ __forceinline__ static int column() { return threadIdx.x % kLanes * kC; }
  // Where a column's number is in a row in shared memory: the first fours of all pieces come first,
  // so that the lanes of a load use different banks.
  __device__ __forceinline__ static int place(int column) {
    return kC == 4 ? column : column / 8 * 4 + column % 4 + column / 4 % 2 * (kColumns / 2);
  }
  // How many numbers of a piece exist, and the first one's offset in the matrix.
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

// A fold adds rows ⊗ columns of every token: the rows' numbers [kRows, kFoldPitch] and the columns'
// [kFoldRows, kColumns]. One of them is v, the other k~ with its decay behind the last token.
template <class Tile, int kT>
struct BufferedShared {
  static constexpr int kRowNumbers = Tile::kRows * kFoldPitch;
  static constexpr int kColumnNumbers = kFoldRows * Tile::kColumns;

  // [kRows, kColumns]; but in a fold, a thread reads what it has copied there itself.
  uint4 state[Tile::kPieces][Tile::kThreads];
  alignas(16) float v[Tile::kVFirst ? kRowNumbers : kColumnNumbers];
  alignas(16) float A[kT][kMostBuffered];
  union {
    alignas(16) float keys[Tile::kVFirst ? kColumnNumbers : kRowNumbers];  // of a fold
    float o[kT][Tile::kParts][Tile::kValues];                              // after it
  };

  __device__ __forceinline__ const float* rows() const { return Tile::kVFirst ? v : keys; }
  __device__ __forceinline__ const float* columns() const { return Tile::kVFirst ? keys : v; }
  __device__ __forceinline__ static int v_index(int j, int value) {
    return Tile::kVFirst ? value * kFoldPitch + j : j * Tile::kColumns + Tile::place(value);
  }
  __device__ __forceinline__ static int key_index(int j, int key) {
    return Tile::kVFirst ? j * Tile::kColumns + Tile::place(key) : key * kFoldPitch + j;
  }
};

// A block's part of a state in shared memory.
template <class Tile, class State, Access kAccess>
struct BufferedState {
  static constexpr int kC = Tile::kC, kPieces = Tile::kPieces;
  using Piece = Vec<State, kC>;

  // Copies all pieces at once; they are there after `wait`.
  template <class Shared>
  __device__ __forceinline__ static void load(const Recurrence& p, const State* matrix,
                                              int first_value, Shared& s) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const State* from = matrix + Tile::offset_of(p, first_value, Tile::row(i), Tile::column());
      const int valid = Tile::valid_of(p, first_value, Tile::row(i), Tile::column());
      if constexpr (kAccess == Access::kFast)
        sm90::copy16(sm90::shared_address(&s.state[i][threadIdx.x]), from, valid > 0);
      else
        put(s, i, load_each<State, kC>(from, valid));
    }
    sm90::commit_copies();
  }
  __device__ __forceinline__ static void wait() { sm90::wait_for_copies<0>(); }

  // Folds the buffer, of which s has v, k~ and the decay, and stores the state: S = decay ⊙ S +
  // rows columnsᵀ on tensor cores, 16 rows and columns at a time. A factor is the sum of
  // two tf32 numbers; the product of the low ones is left out, and v of 16 bits (v_is_short) has
  // none.
  template <class Shared>
  __device__ __forceinline__ static void fold(const Recurrence& p, State* matrix, int first_value,
                                              bool v_is_short, Shared& s) {
    constexpr int kWarps = Tile::kThreads / 32, kAcross = Tile::kColumns / 16;
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
            columns[half][u][e] = s.columns()[(8 * half + 4 * e + t) * Tile::kColumns +
                                              Tile::place(16 * across + r / 2 * 4 + 2 * u + r % 2)];
      const int column = 16 * across + 4 * t;
#pragma unroll 1
      for (int down = warp / kSide; down < kDown; down += kWarps / kSide) {
        float high[2][4], low[4], sums[2][4]{};
        // Small products first: tensor cores truncate when they add.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const Parts x(
                s.rows()[(16 * down + 8 * (e % 2) + r) * kFoldPitch + 8 * half + 4 * (e / 2) + t]);
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
          auto& at = *reinterpret_cast<Four*>(reinterpret_cast<State*>(&s.state[0][0]) +
                                              row * Tile::kColumns + column);
          const Vec<State, 4> S = words_of(at);
          float x[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float decay =
                Tile::kVFirst
                    ? s.columns()[kMostBuffered * Tile::kColumns + Tile::place(column + c)]
                    : s.rows()[row * kFoldPitch + kMostBuffered];
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

  // s.o of `queries` queries, from q on Kp apart; what is beyond them is not used.
  template <int kT, class Shared>
  __device__ __forceinline__ static void multiply(const float* q, int Kp, int queries, Shared& s) {
    if constexpr (Tile::kVFirst)
      multiply_value_rows<kT>(q, Kp, queries, s);
    else
      multiply_key_rows<kT>(q, Kp, queries, s);
  }

 private:
  template <int kN>
  struct alignas(4 * kN) Row {
    float x[kN];
  };
  template <int kN>
  __device__ __forceinline__ static Row<kN> load_row(const float* from) {
    return *reinterpret_cast<const Row<kN>*>(from);
  }

  template <class Shared>
  __device__ __forceinline__ static Piece piece(const Shared& s, int i) {
    const uint4 x = s.state[i][threadIdx.x];
    return {{x.x, x.y, x.z, x.w}};
  }
  template <class Shared>
  __device__ __forceinline__ static void put(Shared& s, int i, const Piece& S) {
    s.state[i][threadIdx.x] = make_uint4(S.words[0], S.words[1], S.words[2], S.words[3]);
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

  // A thread sums its rows of each column, then lanes of a warp are summed.
  template <int kT, class Shared>
  __device__ __forceinline__ static void multiply_key_rows(const float* q, int Kp, int queries,
                                                           Shared& s) {
    float o[kT][kC]{}, r_q[kT][kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int t = 0; t < kT; ++t)
        r_q[t][i] = t < queries && Tile::row(i) < Kp ? q[t * Kp + Tile::row(i)] : 0.f;
    wait();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const Piece S = piece(s, i);
#pragma unroll
      for (int t = 0; t < kT; ++t)
#pragma unroll
        for (int c = 0; c < kC; ++c) o[t][c] = fmaf(r_q[t][i], S[c], o[t][c]);
    }
#pragma unroll
    for (int t = 0; t < kT; ++t) {
#pragma unroll
      for (int c = 0; c < kC; ++c)
#pragma unroll
        for (int lane = Tile::kLanes; lane < 32; lane *= 2)
          o[t][c] += __shfl_xor_sync(0xffffffffu, o[t][c], lane);
      if (threadIdx.x % 32 < Tile::kLanes) {
        float* to = &s.o[t][threadIdx.x / 32][Tile::column()];
#pragma unroll
        for (int c = 0; c < kC; c += 4)
          *reinterpret_cast<float4*>(to + c) =
              make_float4(o[t][c], o[t][c + 1], o[t][c + 2], o[t][c + 3]);
      }
    }
  }

  // A thread sums its columns of each row, then the lanes of a row are summed, at most a warp.
  template <int kT, class Shared>
  __device__ __forceinline__ static void multiply_value_rows(const float* q, int Kp, int queries,
                                                             Shared& s) {
    static_assert(kPieces == 8);
    constexpr int kWidth = Tile::kLanes < 32 ? Tile::kLanes : 32, kOfSum = kWidth / kPieces;
    const int lane = threadIdx.x % kWidth, part = threadIdx.x % Tile::kLanes / 32;
    Row<4> r_q[kT][kC / 4];
#pragma unroll
    for (int t = 0; t < kT; ++t)
#pragma unroll
      for (int c = 0; c < kC / 4; ++c)
        r_q[t][c] = t < queries && Tile::column() < Kp
                        ? load_row<4>(q + t * Kp + Tile::column() + 4 * c)
                        : Row<4>{};
    wait();
#pragma unroll
    for (int t = 0; t < kT; ++t) {
      float o[kPieces]{};
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const Piece S = piece(s, i);
#pragma unroll
        for (int c = 0; c < kC; ++c) o[i] = fmaf(r_q[t][c / 4].x[c % 4], S[c], o[i]);
      }
      reduce_halves<8>(o, kWidth / 2);
      reduce_halves<4>(o, kWidth / 4);
      reduce_halves<2>(o, kWidth / 8);
      float sum = o[0];
#pragma unroll
      for (int mask = kOfSum / 2; mask > 0; mask /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane % kOfSum == 0) s.o[t][part][Tile::row(lane / kOfSum)] = sum;
    }
  }
};

}  // namespace recurrent
}  // namespace gla_ext::cuda
