// Tiles of tokens by columns in shared memory, and the threads that fill them.
#pragma once

#include "chunk.cuh"
#include "mma.cuh"

namespace gla_ext::cuda {

constexpr int kThreads = 256;  // threads of every kernel that multiplies tiles
constexpr int kTile = 64;      // rows and columns of a tile, unless a kernel says otherwise

// threadIdx.x, read again, so that values derived from it are not computed before a loop over
// chunks and kept in registers. thread_index() of sm90/tiles/channels.cuh also tells the compiler
// the range, which makes strong/gradients.cu spill.
__device__ __forceinline__ int thread_anew() {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));
  return thread;
}

// Row pitch in elements: 16 bytes more than the row, so that eight rows of 16 bytes lie in
// different banks.
template <class Op, int kColumns>
constexpr int kPitch = kColumns + 16 / static_cast<int>(sizeof(Op));

// Calls f(pass, row, column) for every eight columns of a tile that this thread fills. A warp has
// whole rows.
template <int kRows, int kColumns, class F>
__device__ __forceinline__ void for_eights(F&& f) {
  constexpr int kEights = kColumns / 8, kStep = kThreads / kEights;
  static_assert(kRows % kStep == 0, "every thread fills as many eights");
#pragma unroll
  for (int pass = 0; pass < kRows / kStep; ++pass)
    f(pass, static_cast<int>(threadIdx.x) / kEights + pass * kStep,
      static_cast<int>(threadIdx.x) % kEights * 8);
}
template <int kRows, int kColumns>
constexpr int kPasses = kRows * kColumns / 8 / kThreads;

// The parts of the eight warps, two by four, in a product of 64 rows by kColumns.
template <int kColumns>
struct WarpTile {
  static constexpr int kN = kColumns / 32;  // blocks of 8 columns; there are 2 of 16 rows
  int m, n;                                 // first row and column

  __device__ __forceinline__ WarpTile()
      : m(static_cast<int>(threadIdx.x) / 32 % 2 * 32),
        n(static_cast<int>(threadIdx.x) / 64 * (kColumns / 4)) {}
};

// Stores this thread's part of a tile, as operands, to shared memory.
template <int kColumns, class Op, int kN>
__device__ __forceinline__ void store_tile(Op* tile, const Eight<Op> (&x)[kN]) {
  static_assert(kN == kPasses<kTile, kColumns>, "every eight is stored");
  for_eights<kTile, kColumns>([&](int pass, int row, int column) {
    store8(tile + row * kPitch<Op, kColumns> + column, x[pass]);
  });
}

// Stores a product of 64 rows by kColumns as an fp32 tile, from which whole rows can be read.
template <int kColumns, int kRowPitch>
__device__ __forceinline__ void store_product(float (*rows)[kRowPitch],
                                              const float (&acc)[2][WarpTile<kColumns>::kN][4]) {
  const WarpTile<kColumns> warp;
  for_pairs(acc, [&](int r, int c, float x0, float x1) {
    *reinterpret_cast<float2*>(&rows[warp.m + r][warp.n + c]) = make_float2(x0, x1);
  });
}

// Loads eight columns of row `token` of q, k, v, do .. in the format of memory; zero from `length`
// on.
template <Access kAccess, class T>
__device__ __forceinline__ Eight<T> load_row(const T* base, const Rows& r, int token, int length,
                                             int column, int columns) {
  return load8<kAccess>(base + token_offset(r, token) + column,
                        token < length ? columns - column : 0);
}

// load_row for a tensor that the kernel may be overwriting: dq_intra may be dq.
template <Access kAccess>
__device__ __forceinline__ Eight<float> load_row_written(const float* base, const Rows& r,
                                                         int token, int length, int column,
                                                         int columns) {
  const float* p = base + token_offset(r, token) + column;
  if constexpr (kAccess == Access::kGeneral)
    return load8<kAccess>(p, token < length ? columns - column : 0);
  Eight<float> x;
  x.clear();
  if (token < length && column < columns) x = load8_aligned(p);
  return x;
}

// A tile of tokens, loaded ahead into registers before it goes to shared memory.
template <Access kAccess, class In, int kColumns>
struct TileRows {
  Eight<In> x[kPasses<kTile, kColumns>];

  __device__ __forceinline__ void load(const In* base, const Rows& r, int length, int first_column,
                                       int columns) {
    for_eights<kTile, kColumns>([&](int pass, int row, int column) {
      x[pass] = load_row<kAccess>(base, r, row, length, first_column + column, columns);
    });
  }
  template <class Op>
  __device__ __forceinline__ void store(Op* tile, bool tf32) const {
    for_eights<kTile, kColumns>([&](int pass, int row, int column) {
      store8(tile + row * kPitch<Op, kColumns> + column, to_operands<Op>(x[pass], tf32));
    });
  }
};

// A tile of a state's rows [K][V], starting at key channel `first_k` and value `first_v`, loaded
// ahead.
template <Access kAccess, class In, int kColumns>
struct StateRows {
  using Op = Operand<In>;
  Eight<Op> x[kPasses<kTile, kColumns>];

  __device__ __forceinline__ void load(const Problem& p, const void* states, DType dtype,
                                       int64_t state, int first_k, int first_v) {
    for_eights<kTile, kColumns>([&](int pass, int row, int column) {
      const int k = first_k + row, v = first_v + column;
      x[pass] = load8_operands<kAccess, Op>(states, dtype, state + k * p.V + v,
                                            k < p.K ? p.V - v : 0, takes_tf32<In>(p));
    });
  }
  __device__ __forceinline__ void store(Op* tile) const { store_tile<kColumns>(tile, x); }
};

}  // namespace gla_ext::cuda
