// Backward steps 1, 3 (of A) to 7 of a chunk in one kernel, for bf16 on sm_90a. Per key channel,
// with q^ = scale q 2^(b - from), k^ = k 2^(to - b) and k_out = k 2^(b_C - b),
//
//   A  = tril(q^ k^T)                        dv = A^T do + k_out dS'        dA = tril(do v^T)
//   x  = 2^from do S^T + dA k^               dq = scale 2^(b - from) x
//   y  = 2^(b_C - to) v dS'^T + dA^T q^      dk = 2^(to - b) y
//   dg_t = sum_(i >= t) [q^ x - k^ y]_i + sum_j k^_j 2^(b_C - to) (v dS'^T)_j + 2^b_C rowsum(S dS')
//
// In tier 1 from = to = r. Other chunks have from = 0 and to = b_C, which is exact at any gate;
// their A is given, and dA's terms are dq_intra, dk_intra and dg_intra.
//
// grid    (row, chunk, head); a warpgroup for each 64 key channels
// reads   q, k, g [B, T, H, K], v, do [B, T, H, V], S, dS' [K, V] of the chunk, tiers; outside
//         tier 1 A [B, T, H, C] and dq_intra, dk_intra, dg_intra [B, T, H, K]
// writes  dq, dk, dg [B, T, H, K], dv [B, T, H, V]
// Accumulation, b and dg are fp32; 64 values at a time.
#include "../device/gates.cuh"
#include "../device/launch.cuh"
#include "dynamic_shared.h"
#include "ptx.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kTileBytes = kTile * kTile * 2;  // [64][64] bf16
template <int kGroups>
constexpr int kBlocks = kGroups == 1   ? 3
                        : kGroups == 2 ? 2
                                       : 1;  // of a multiprocessor
constexpr int kParts = kSubChunks;           // of a chunk's tokens, where a thread has a part

// A chunk's first values and its states.
struct Bases {
  const bf16 *d_o, *v, *S, *dS;
  bf16* dv;
};

// kGroups warpgroups, each with 64 of the key channels, and with 64 / kGroups columns of A, dA
// and of a tile of dv.
template <int kGroups>
struct Shared {
  static constexpr int kChannels = kGroups * kTile;
  struct Operands {
    unsigned char k_out[kGroups][kTileBytes];                       // [token][K]
    unsigned char S[kGroups][kTileBytes], dS[kGroups][kTileBytes];  // [K][64 values]
    unsigned char d_o[kTileBytes], v[kTileBytes];                   // [token][64 values]
  };
  struct Sums {
    float gates[kParts][kChannels], dg[kParts][kChannels];  // of a part of the tokens
    float inter[kParts][kChannels];  // of k^ 2^(b_C - to) v dS'^T, of a warp's tokens
    float states[kChannels];         // rowsum(S dS')
  };
  unsigned char q[kGroups][kTileBytes], k[kGroups][kTileBytes];  // q^ and k^, [token][K]
  union {
    Operands operands;
    float gradients[2][kGroups][kTile * kTile];  // x and y, [token][K]
  };
  union {
    unsigned char A[kTileBytes];  // [token][token]
    Sums sums;
  };
  unsigned char dv[kTileBytes];  // [token][64 values]
  float b_last[kChannels];
  Chunk chunk;  // here and no longer in registers, which accumulators take
  Bases bases;
};

// threadIdx.x, read anew: what follows from it takes no registers while products run.
__device__ __forceinline__ int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Byte offset of 16 bytes in a tile of 64 columns, as `descriptor` reads it.
__device__ __forceinline__ int swizzled(int row, int part) {
  return row * 128 + ((part ^ (row & 7)) << 4);
}
// Of an fp32 tile: pairs of eight rows lie in different banks.
__device__ __forceinline__ int swizzled_float(int row, int column) {
  return row * kTile + (column ^ ((row & 3) << 3));
}

__device__ __forceinline__ uint32_t pack(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(float2 pair) { return pair; }
__device__ __forceinline__ uint32_t& word(unsigned char* tile, int offset) {
  return *reinterpret_cast<uint32_t*>(tile + offset);
}

// Exponents of a channel's operands: q^ = q 2^(b - from), k^ = k 2^(to - b).
struct References {
  float from, to;
  __device__ __forceinline__ References(float b_last, bool exact)
      : from(exact ? 0.f : reference_of(b_last)), to(exact ? b_last : from) {}
};

// A warpgroup and a lane's place in the 64 rows of its products.
struct Place {
  int thread, group, row, t;  // t: of the pair of neighbours in eight columns
  __device__ __forceinline__ Place()
      : thread(thread_index()),
        // One value a warp, so that the compiler knows products are not in diverging branches.
        group(__shfl_sync(0xffffffffu, thread / kGroupThreads, 0)),
        row(thread % kGroupThreads / 32 * 16 + thread % 32 / 4),
        t(thread % 4) {}
};

// Copies

// How the threads of a block move a tile of 64 columns, a row's 16 bytes each: thread i has part
// i % 8 of row i / 8 and of every kStep-th row behind it.
template <int kGroups>
struct Mover {
  static constexpr int kStep = kGroups * kGroupThreads / 8;
  int row, column, offset;  // offset: bytes in a tile

  __device__ __forceinline__ Mover() : Mover(thread_index()) {}
  __device__ __forceinline__ explicit Mover(int thread)
      : row(thread / 8), column(thread % 8 * 8), offset(swizzled(row, column / 8)) {}

  // From `p`, this thread's first 16 bytes, zero from row `rows` on or where nothing is `inside`.
  template <int kRows>
  __device__ __forceinline__ void copy(unsigned char* tile, const bf16* p, int32_t stride, int rows,
                                       bool inside) const {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const bool there = inside && row + i * kStep < rows;
      copy16(shared_address(tile) + offset + i * kStep * 128, p + i * kStep * stride, there);
    }
  }
  __device__ __forceinline__ void store(bf16* p, const unsigned char* tile, int32_t stride,
                                        int rows, bool inside) const {
#pragma unroll
    for (int i = 0; i < kTile / kStep; ++i)
      if (inside && row + i * kStep < rows)
        *reinterpret_cast<uint4*>(p + i * kStep * stride) =
            *reinterpret_cast<const uint4*>(tile + offset + i * kStep * 128);
  }
};

// Zeros in a chunk's rows of an output, in little code: it is in the way of all other chunks.
template <class T, int kGroups>
__device__ __forceinline__ void clear_rows(const Rows& r, const Chunk& chunk, int columns) {
  const Mover<kGroups> mover;
#pragma unroll 1
  for (int row = mover.row; row < chunk.length; row += Mover<kGroups>::kStep)
#pragma unroll 1
    for (int column = mover.column; column < columns; column += kTile)
      store8(rows_at<T>(r, chunk) + token_offset(r, row) + column, Eight<T>{});
}

// The next 64 values and the states' columns of them, from `first` on.
template <int kGroups>
__device__ __forceinline__ void copy_values(Shared<kGroups>& s, const Problem& p,
                                            const Bases& bases, int length, int first) {
  const Mover<kGroups> mover;
  const int column = first + mover.column;
  const bool inside = column < p.V;
  const int32_t state = mover.row * p.V + column;
  mover.template copy<kTile>(s.operands.d_o, bases.d_o + token_offset(p.d_o, mover.row) + column,
                             token_offset(p.d_o, 1), length, inside);
  mover.template copy<kGroups * kTile>(s.operands.S[0], bases.S + state, p.V, p.K, inside);
  mover.template copy<kTile>(s.operands.v, bases.v + token_offset(p.v, mover.row) + column,
                             token_offset(p.v, 1), length, inside);
  mover.template copy<kGroups * kTile>(s.operands.dS[0], bases.dS + state, p.V, p.K, inside);
  commit_copies();
}

// dv of 64 values to memory.
template <int kGroups>
__device__ __forceinline__ void write_values(const Shared<kGroups>& s, const Problem& p,
                                             int first) {
  const Mover<kGroups> mover;
  const int column = first + mover.column;
  mover.store(s.bases.dv + token_offset(p.dv, mover.row) + column, s.dv, token_offset(p.dv, 1),
              s.chunk.length, column < p.V);
}

// Gates

// A thread has a pair of channels in a part of the tokens.
template <int kGroups>
struct Pair {
  int channel, first;  // key channel, token
  int part;

  __device__ __forceinline__ Pair() : Pair(thread_index()) {}
  __device__ __forceinline__ explicit Pair(int thread)
      : channel(2 * (thread % (kGroups * kTile / 2))),
        first(thread / (kGroups * kTile / 2) * static_cast<int>(kSubChunk)),
        part(thread / (kGroups * kTile / 2)) {}
  // Byte offset in the tiles of q^, k^ and k_out.
  __device__ __forceinline__ int offset(int token) const {
    return channel / kTile * kTileBytes + swizzled(token, channel % kTile / 8) + channel % 8 * 2;
  }
};

// The pair's elements of a row a token, as they lie in memory, on their way.
template <class T>
struct PairColumn {
  using Word = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;
  Word x[kSubChunk];

  __device__ __forceinline__ PairColumn(const Rows& r, const Problem& p, const Chunk& chunk,
                                        int first, int channel) {
    const T* at = rows_at<const T>(r, chunk) + token_offset(r, first) + channel;
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i, at += r.stride_t)
      x[i] =
          channel < p.K && first + i < chunk.length ? *reinterpret_cast<const Word*>(at) : Word{};
  }
  __device__ __forceinline__ float2 operator[](int i) const { return unpack(x[i]); }
};

__device__ __forceinline__ float2 to_log2(float2 g) {
  return make_float2(cuda::to_log2(g.x), cuda::to_log2(g.y));
}
__device__ __forceinline__ float2 operator+(float2 a, float2 b) {
  return make_float2(a.x + b.x, a.y + b.y);
}
__device__ __forceinline__ float2 operator-(float2 a, float2 b) {
  return make_float2(a.x - b.x, a.y - b.y);
}
__device__ __forceinline__ float2 operator*(float2 a, float2 b) {
  return make_float2(a.x * b.x, a.y * b.y);
}
__device__ __forceinline__ float2& pair_at(float* row, int channel) {
  return *reinterpret_cast<float2*>(row + channel);
}

// The pair's b before its part of the tokens, and after the last.
struct Cumsum {
  float2 b = make_float2(0.f, 0.f), last = b;
};
template <class Gate, int kGroups>
__device__ __forceinline__ void sum_gates(Shared<kGroups>& s, const PairColumn<Gate>& gates,
                                          const Pair<kGroups>& pair) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) sum = sum + to_log2(gates[i]);
  pair_at(s.sums.gates[pair.part], pair.channel) = sum;
}
template <int kGroups>
__device__ __forceinline__ Cumsum cumsum(Shared<kGroups>& s, const Pair<kGroups>& pair) {
  Cumsum c;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float2 x = pair_at(s.sums.gates[part], pair.channel);
    if (part < pair.part) c.b = c.b + x;
    c.last = c.last + x;
  }
  return c;
}

// q^, k^, k_out and b_C, while the first values are on their way.
template <class Gate, int kGroups>
__device__ __forceinline__ void gate_operands(Shared<kGroups>& s, const Problem& p,
                                              const Chunk& chunk, bool exact) {
  const Pair<kGroups> pair;
  const PairColumn<Gate> gates(p.g, p, chunk, pair.first, pair.channel);
  const PairColumn<bf16> q(p.q, p, chunk, pair.first, pair.channel);
  const PairColumn<bf16> k(p.k, p, chunk, pair.first, pair.channel);
  const int64_t state = chunk.state * p.K * p.V;
  const Bases bases{rows_at<const bf16>(p.d_o, chunk), rows_at<const bf16>(p.v, chunk),
                    static_cast<const bf16*>(p.S) + state, static_cast<const bf16*>(p.dS) + state,
                    rows_at<bf16>(p.dv, chunk)};
  copy_values(s, p, bases, chunk.length, 0);
  if (threadIdx.x == 0) {
    s.chunk = chunk;
    s.bases = bases;
  }
  sum_gates(s, gates, pair);
  __syncthreads();  // s.sums.gates is written
  auto [b, last] = cumsum(s, pair);
  if (pair.part == 0) pair_at(s.b_last, pair.channel) = last;
  const References rx(last.x, exact), ry(last.y, exact);
  const float out_x = exp2_ftz(last.x - rx.to), out_y = exp2_ftz(last.y - ry.to);
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) {
    b = b + to_log2(gates[i]);
    const int at = pair.offset(pair.first + i);
    const float k_x = k[i].x * exp2_ftz(rx.to - b.x), k_y = k[i].y * exp2_ftz(ry.to - b.y);
    word(s.q[0], at) = pack(q[i].x * p.scale * exp2_ftz(b.x - rx.from),
                            q[i].y * p.scale * exp2_ftz(b.y - ry.from));
    word(s.k[0], at) = pack(k_x, k_y);
    word(s.operands.k_out[0], at) = pack(k_x * out_x, k_y * out_y);
  }
}

// Products

// d += A B over 16 kSteps summed elements; an operand's step is bytes from 16 of them to the next.
template <Contiguous kA, Contiguous kB, int kN>
__device__ __forceinline__ void multiply(float (&d)[kN], uint32_t a_address, uint32_t b_address) {
  const uint64_t a = descriptor(a_address, 0), b = descriptor(b_address, 0);
  constexpr int kStepA = kA == Contiguous::kSummed ? 32 : 16 * 128;
  constexpr int kStepB = kB == Contiguous::kSummed ? 32 : 16 * 128;
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i)
    product<kA, kB>(d, a + i * (kStepA >> 4), b + i * (kStepB >> 4));
}

template <int kN>
__device__ __forceinline__ void clear(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) d[i] = 0;
}

// This warpgroup's columns of a [64 x 64] bf16 tile.
template <int kN>
__device__ __forceinline__ void store_columns(unsigned char* tile, const float (&d)[kN]) {
  const Place at;
#pragma unroll
  for (int j = 0; j < kN / 4; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      word(tile, swizzled(at.row + 8 * e, at.group * (kN / 4) + j) + 4 * at.t) =
          pack(d[4 * j + 2 * e], d[4 * j + 2 * e + 1]);
}

// The same of scores, dropped above the diagonal.
template <int kN>
__device__ __forceinline__ void store_scores(unsigned char* tile, float (&d)[kN]) {
  const Place at;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const int row = at.row + i / 2 % 2 * 8, column = at.group * 2 * kN + i / 4 * 8 + 2 * at.t;
    d[i] = column + i % 2 <= row ? d[i] : 0.f;
  }
  store_columns(tile, d);
}

// A of the chunk into shared memory.
template <int kGroups>
__device__ __forceinline__ void scores(Shared<kGroups>& s, const Problem& p, const Chunk& chunk,
                                       bool exact) {
  constexpr auto kSummed = Contiguous::kSummed;
  constexpr int kN = 32 / kGroups;
  if (exact) {
    const Mover<kGroups> mover;
    mover.template copy<kTile>(
        s.A, rows_at<const bf16>(p.A, chunk) + token_offset(p.A, mover.row) + mover.column,
        token_offset(p.A, 1), chunk.length, true);
    commit_copies();
    return;
  }
  const Place at;
  float A[kN];
  clear(A);
  begin_products();
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    multiply<kSummed, kSummed>(A, shared_address(s.q[i]),
                               shared_address(s.k[i]) + at.group * 2 * kN * 128);
  commit_products();
  wait_for_products<0>();
  store_scores(s.A, A);
}

// do S^T and v dS'^T of this warpgroup's channels, its columns of do v^T.
template <int kGroups>
struct Accumulators {
  float x[32], y[32], dA[32 / kGroups];
};

// Adds this thread's half of a row of S dS' to `sum`.
template <int kGroups>
__device__ __forceinline__ void add_states(float& sum, Shared<kGroups>& s) {
  const int thread = thread_index(), row = thread / 2, half = thread % 2;
#pragma unroll 2
  for (int i = 0; i < 4; ++i) {
    const int at = swizzled(row, 4 * half + i);
    const auto S = load8_aligned(reinterpret_cast<const bf16*>(s.operands.S[0] + at));
    const auto dS = load8_aligned(reinterpret_cast<const bf16*>(s.operands.dS[0] + at));
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += S[e] * dS[e];
  }
}

// All that sums over values: dv, do S^T, v dS'^T, do v^T and rowsum(S dS').
template <int kGroups>
__device__ __forceinline__ void multiply_values(Accumulators<kGroups>& acc, Shared<kGroups>& s,
                                                const Problem& p) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  constexpr int kN = 32 / kGroups, kColumns = 2 * kN;
  auto& operands = s.operands;
  const uint32_t d_o = shared_address(operands.d_o), v = shared_address(operands.v);
  const uint32_t dS = shared_address(operands.dS[0]), k_out = shared_address(operands.k_out[0]);
  float states = 0;
#pragma unroll 1
  for (int first = 0; first < p.V; first += kTile) {
    wait_for_copies<0>();
    fence_for_products();
    __syncthreads();  // the values, the states and A are there, dv of the values before is read
    const Place at;
    float dv[kN];
    clear(dv);
    begin_products();
    multiply<kSummed, kSummed>(acc.x, d_o, shared_address(operands.S[at.group]));
    multiply<kSummed, kSummed>(acc.y, v, shared_address(operands.dS[at.group]));
    multiply<kSummed, kSummed>(acc.dA, d_o, v + at.group * kColumns * 128);
    multiply<kOther, kOther>(dv, shared_address(s.A), d_o + at.group * kColumns * 2);
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
      multiply<kSummed, kOther>(dv, k_out + i * kTileBytes,
                                dS + i * kTileBytes + at.group * kColumns * 2);
    commit_products();
    add_states(states, s);
    wait_for_products<0>();
    store_columns(s.dv, dv);
    __syncthreads();  // dv is written, the operands are read
    if (first + kTile < p.V) copy_values(s, p, s.bases, s.chunk.length, first + kTile);
    write_values(s, p, first);
  }
  states += __shfl_xor_sync(0xffffffffu, states, 1);
  const int thread = thread_index();
  if (thread % 2 == 0) s.sums.states[thread / 2] = states;
}

// Adds x of the lane kHalf rows away, and keeps the half of the columns that is this lane's.
template <int kHalf>
__device__ __forceinline__ void fold_rows(float (&x)[16]) {
  const bool upper = (static_cast<int>(threadIdx.x) & 4 * kHalf) != 0;
#pragma unroll
  for (int i = 0; i < 2 * kHalf; ++i) {
    const float sent = upper ? x[i] : x[i + 2 * kHalf], kept = upper ? x[i + 2 * kHalf] : x[i];
    x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, 4 * kHalf);
  }
}

// Brings both accumulators to the scale of the products inside the chunk, and sums what the states
// that leave it owe to k.
template <int kGroups>
__device__ __forceinline__ void scale_inter(Accumulators<kGroups>& acc, Shared<kGroups>& s,
                                            bool exact) {
  const Place at;
  float sums[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = at.group * kTile + 8 * j + 2 * at.t;
    const float2 last = pair_at(s.b_last, column);
    const References rx(last.x, exact), ry(last.y, exact);
    const float2 from = make_float2(exp2_ftz(rx.from), exp2_ftz(ry.from));
    const float2 to = make_float2(exp2_ftz(last.x - rx.to), exp2_ftz(last.y - ry.to));
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2 k = unpack(word(s.k[at.group], swizzled(at.row + 8 * e, j) + 4 * at.t));
      acc.x[4 * j + 2 * e] *= from.x;
      acc.x[4 * j + 2 * e + 1] *= from.y;
      acc.y[4 * j + 2 * e] *= to.x;
      acc.y[4 * j + 2 * e + 1] *= to.y;
      sum = sum + make_float2(k.x * acc.y[4 * j + 2 * e], k.y * acc.y[4 * j + 2 * e + 1]);
    }
    sums[2 * j] = sum.x;
    sums[2 * j + 1] = sum.y;
  }
  // Lane 4 g + t is left with pair t of the g-th eight columns, summed over the warp's rows.
  fold_rows<4>(sums);
  fold_rows<2>(sums);
  fold_rows<1>(sums);
  const int warp = at.thread % kGroupThreads / 32, g = at.thread % 32 / 4;
  pair_at(s.sums.inter[warp], at.group * kTile + 8 * g + 2 * at.t) = make_float2(sums[0], sums[1]);
}

// dA k^ and dA^T q^ on top.
template <int kGroups>
__device__ __forceinline__ void multiply_scores(Accumulators<kGroups>& acc, Shared<kGroups>& s) {
  const Place at;
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  const uint32_t dA = shared_address(s.operands.v);
  begin_products();
  multiply<kSummed, kOther>(acc.x, dA, shared_address(s.k[at.group]));
  multiply<kOther, kOther>(acc.y, dA, shared_address(s.q[at.group]));
  commit_products();
  wait_for_products<0>();
}

// Results

template <int kGroups>
__device__ __forceinline__ void store_accumulators(Shared<kGroups>& s,
                                                   const Accumulators<kGroups>& acc) {
  const Place at;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int offset = swizzled_float(at.row + 8 * e, 8 * j + 2 * at.t), i = 4 * j + 2 * e;
      pair_at(s.gradients[0][at.group], offset) = make_float2(acc.x[i], acc.x[i + 1]);
      pair_at(s.gradients[1][at.group], offset) = make_float2(acc.y[i], acc.y[i + 1]);
    }
}

// The pair's elements of one token after the other.
template <class T>
struct PairRow {
  T* at;
  int64_t stride;

  template <int kGroups>
  __device__ __forceinline__ PairRow(const Rows& r, const Chunk& chunk, const Pair<kGroups>& pair,
                                     int token = 0)
      : at(rows_at<T>(r, chunk) + token_offset(r, pair.first + token) + pair.channel),
        stride(r.stride_t) {}
  __device__ __forceinline__ void move(int tokens) { at += tokens * stride; }
  __device__ __forceinline__ void write(float2 x) const { store2<Access::kFast>(at, x.x, x.y, 2); }
};

template <class T>
__device__ __forceinline__ float2 read_pair(const Rows& r, const Chunk& chunk, int token,
                                            int channel) {
  return load2<Access::kFast>(rows_at<const T>(r, chunk) + token_offset(r, token) + channel, 2);
}

// dq and dk from x and y, a thread a pair of channels and a part of the tokens. What dg sums of
// them takes x's place: of the rounded operands where those made pairs that must cancel, else not.
template <bool kExact, class Gate, int kGroups>
__device__ __forceinline__ void write_inputs(Shared<kGroups>& s, const PairColumn<Gate>& gates,
                                             const Problem& p, const Chunk& chunk) {
  const Pair<kGroups> pair;
  auto [b, last] = cumsum(s, pair);
  const References rx(last.x, kExact), ry(last.y, kExact);
  const int tile = pair.channel / kTile, column = pair.channel % kTile;
  PairRow<bf16> dq_row(p.dq, chunk, pair), dk_row(p.dk, chunk, pair);
  float2 sum = make_float2(0.f, 0.f), inter = sum;
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i, dq_row.move(1), dk_row.move(1)) {
    const int token = pair.first + i, at = pair.offset(token);
    const bool there = pair.channel < p.K && token < chunk.length;
    b = b + to_log2(gates[i]);
    float2& s_x = pair_at(s.gradients[0][tile], swizzled_float(token, column));
    const float2 x = s_x, y = pair_at(s.gradients[1][tile], swizzled_float(token, column));
    float2 dq = make_float2(p.scale * exp2_ftz(b.x - rx.from), p.scale * exp2_ftz(b.y - ry.from));
    float2 dk = make_float2(exp2_ftz(rx.to - b.x), exp2_ftz(ry.to - b.y));
    dq = dq * x;
    dk = dk * y;
    float2 to_q, to_k;  // what dg sums
    if constexpr (kExact) {
      const float2 none = make_float2(0.f, 0.f);
      to_q = there ? read_pair<bf16>(p.q, chunk, token, pair.channel) * dq : none;
      to_k = there ? read_pair<bf16>(p.k, chunk, token, pair.channel) * dk : none;
      inter = inter + to_k;
    } else {
      to_q = unpack(word(s.q[0], at)) * x;
      to_k = unpack(word(s.k[0], at)) * y;
    }
    s_x = to_q - to_k;
    sum = sum + s_x;
    if (!there) continue;
    if constexpr (kExact) {
      dq = dq + read_pair<float>(p.dq_intra, chunk, token, pair.channel);
      dk = dk + read_pair<float>(p.dk_intra, chunk, token, pair.channel);
    }
    dq_row.write(dq);
    dk_row.write(dk);
  }
  pair_at(s.sums.dg[pair.part], pair.channel) = sum;
  if (kExact) pair_at(s.sums.inter[pair.part], pair.channel) = inter;
}

// dg, by the same threads from the last token to the first.
template <bool kExact, class Gate, int kGroups>
__device__ __forceinline__ void write_gates(Shared<kGroups>& s, const PairColumn<Gate>& gates,
                                            const Problem& p, const Chunk& chunk) {
  constexpr int kLast = static_cast<int>(kSubChunk) - 1;
  const Pair<kGroups> pair;
  if (pair.channel >= p.K) return;
  const int tile = pair.channel / kTile, column = pair.channel % kTile;
  const float2 last = cumsum(s, pair).last, states = pair_at(s.sums.states, pair.channel);
  float2 sum = make_float2(exp2_ftz(last.x) * states.x, exp2_ftz(last.y) * states.y);
#pragma unroll
  for (int part = 0; part < kParts; ++part) sum = sum + pair_at(s.sums.inter[part], pair.channel);
  for (int part = kParts - 1; part > pair.part; --part)
    sum = sum + pair_at(s.sums.dg[part], pair.channel);
  PairRow<Gate> dg_row(p.dg, chunk, pair, kLast);
#pragma unroll
  for (int i = kLast; i >= 0; --i) {
    const int token = pair.first + i;
    sum = sum + pair_at(s.gradients[0][tile], swizzled_float(token, column));
    if (token < chunk.length) {
      const float2 x = to_log2(gates[i]);
      float2 dg = sum;
      if (kExact) dg = dg + read_pair<float>(p.dg_intra, chunk, token, pair.channel);
      dg_row.write(make_float2(x.x <= kReset ? 0.f : dg.x, x.y <= kReset ? 0.f : dg.y));
    }
    dg_row.move(-1);
  }
}

template <bool kExact, class Gate, int kGroups>
__device__ __forceinline__ void write_gradients(Shared<kGroups>& s, const PairColumn<Gate>& gates,
                                                const Problem& p) {
  const Chunk chunk = s.chunk;
  write_inputs<kExact>(s, gates, p, chunk);
  __syncthreads();  // the sums that dg is made of are written
  write_gates<kExact>(s, gates, p, chunk);
}

template <class Gate, int kGroups>
__global__ void __launch_bounds__(kGroups* kGroupThreads, kBlocks<kGroups>)
    gradients_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  Shared<kGroups>& s = *reinterpret_cast<Shared<kGroups>*>(s_bytes);
  const Chunk chunk = find_chunk(p, blockIdx.x);
  if (chunk.length == 0) return;
  if (chunk.tail) {
    clear_rows<bf16, kGroups>(p.dq, chunk, p.K);
    clear_rows<bf16, kGroups>(p.dk, chunk, p.K);
    clear_rows<Gate, kGroups>(p.dg, chunk, p.K);
    clear_rows<bf16, kGroups>(p.dv, chunk, p.V);
    return;
  }
  const bool exact = __any_sync(0xffffffffu, !in_tier1(p, chunk));
  gate_operands<Gate>(s, p, chunk, exact);
  fence_for_products();
  __syncthreads();  // q^, k^, k_out and b_C are written, s.sums.gates is read
  scores(s, p, chunk, exact);

  Accumulators<kGroups> acc;
  clear(acc.x);
  clear(acc.y);
  clear(acc.dA);
  multiply_values(acc, s, p);
  if (!exact) store_scores(s.operands.v, acc.dA);
  scale_inter(acc, s, exact);
  const Pair<kGroups> pair;
  const PairColumn<Gate> gates(p.g, p, s.chunk, pair.first, pair.channel);
  if (!exact) {
    fence_for_products();
    __syncthreads();  // dA is written
    multiply_scores(acc, s);
  }
  sum_gates(s, gates, pair);
  __syncthreads();  // dA is read: x and y take its place
  store_accumulators(s, acc);
  __syncthreads();  // x, y and all sums but dg's are written
  if (exact)
    write_gradients<true>(s, gates, p);
  else
    write_gradients<false>(s, gates, p);
#endif
}

template <class Gate, int kGroups>
void launch_gradients(const Problem& p, cudaStream_t stream) {
  static const DynamicShared shared(gradients_kernel<Gate, kGroups>, sizeof(Shared<kGroups>));
  const int64_t blocks = chunk_heads(p);
  if (blocks == 0) return;
  shared.allow();
  gradients_kernel<Gate, kGroups><<<dim3(static_cast<unsigned>(blocks)), kGroups * kGroupThreads,
                                    sizeof(Shared<kGroups>), stream>>>(p);
}

template <class Gate>
void launch_gradients(const Problem& p, cudaStream_t stream) {
  if (p.K <= kTile)
    launch_gradients<Gate, 1>(p, stream);
  else if (p.K <= 2 * kTile)
    launch_gradients<Gate, 2>(p, stream);
  else
    launch_gradients<Gate, 4>(p, stream);
}

}  // namespace

void gradients(const Problem& p, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    launch_gradients<float>(p, stream);
  else
    launch_gradients<bf16>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
