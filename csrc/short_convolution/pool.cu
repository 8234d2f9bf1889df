// The short convolution on a pool of caches [P, D, W]. Rows of a few tokens, as in decoding, take
// one launch: a thread has 16 bytes of a row's channels, keeps their last W inputs in registers,
// and takes one token after the other. Other rows take forward.cu between two launches that copy
// caches, with one thread per element.
//
// reads   x [B, T, D], w [D, W], bias [D], the caches of the slots
// writes  y [B, T, D], the caches of the write slots
// A token's y has the same bits as in forward.cu: the same sum, oldest input first, in fp32.
#include "tokens.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int64_t kStepTokens = 16;  // tokens of a row, at most
constexpr int kPoolThreads = 256;

struct Slots {
  int64_t from, to;  // -1: none
};
__device__ __forceinline__ Slots slots_of(const ConvolutionPool& pool, int64_t n) {
  const auto inside = [&](int64_t slot) {
    return slot >= 0 && slot < pool.slots_in_pool ? slot : -1;
  };
  const int64_t from = pool.slots.data != nullptr ? index_at(pool.slots, n) : n;
  const int64_t to = pool.write_slots.data != nullptr ? index_at(pool.write_slots, n) : from;
  return {inside(from), inside(to)};
}
__device__ __forceinline__ bool goes_on(const ConvolutionPool& pool, int64_t n) {
  return pool.has_initial_state == nullptr || pool.has_initial_state[n];
}

template <class T, int kW>
__global__ void __launch_bounds__(kConvThreads)
    step(const __grid_constant__ Convolution p, const __grid_constant__ ConvolutionPool pool,
         const ConvolutionGrid grid) {
  constexpr int kC = 16 / sizeof(T);
  const Place<kC> place(p, grid);
  if (place.valid == 0) return;
  float w[kW][kC], bias[kC];
  load_taps<kW>(p.weight, p.weight_dtype, p.aligned, place, w);
  load_bias(p, place, bias);
  for (int64_t n = place.row; n < p.B; n += place.rows) {
    const Slots slots = slots_of(pool, n);
    T* y = static_cast<T*>(p.y) + n * p.T * p.D + place.channel;
    Vec<T, kC> in[kW];  // the last W inputs, oldest first
#pragma unroll
    for (int i = 0; i < kW; ++i) in[i].clear();
    if (slots.from >= 0 && goes_on(pool, n)) {
      const T* cache = static_cast<const T*>(pool.state) + slots.from * pool.stride;
#pragma unroll
      for (int i = 0; i < kW; ++i)
#pragma unroll
        for (int c = 0; c < kC; ++c)
          if (c < place.valid) in[i].set(c, cache[(place.channel + c) * kW + i]);
    }
#pragma unroll 1
    for (int64_t t = 0; t < p.T; ++t) {
      float z[kC];
      if (slots.from >= 0) {
#pragma unroll
        for (int i = 0; i + 1 < kW; ++i) in[i] = in[i + 1];
        in[kW - 1] = load_row(p, row_of<T>(p.x, n, t, place), place);
        preactivation(w, bias, in, z);
      }
#pragma unroll
      for (int c = 0; c < kC; ++c) z[c] = slots.from >= 0 ? silu<T>(z[c]) : 0.f;
      store_vec(y + t * p.D, z, place.valid, p.aligned);
    }
    if (slots.from < 0 || slots.to < 0) continue;
    T* cache = static_cast<T*>(pool.state) + slots.to * pool.stride;
#pragma unroll
    for (int i = 0; i < kW; ++i)
#pragma unroll
      for (int c = 0; c < kC; ++c)
        if (c < place.valid) cache[(place.channel + c) * kW + i] = from_float<T>(in[i][c]);
  }
}

template <class T>
__global__ void __launch_bounds__(kPoolThreads)
    gather(const __grid_constant__ Convolution p, const __grid_constant__ ConvolutionPool pool,
           T* cache) {
  const int64_t size = p.D * p.W;
  for (int64_t i = int64_t{blockIdx.x} * kPoolThreads + threadIdx.x; i < p.N * size;
       i += int64_t{gridDim.x} * kPoolThreads) {
    const int64_t n = i / size, from = slots_of(pool, n).from;
    const bool there = from >= 0 && goes_on(pool, n);
    cache[i] = there ? static_cast<const T*>(pool.state)[from * pool.stride + i - n * size]
                     : from_float<T>(0.f);
  }
}

// Writes zeros to y of a sequence; a thread has some of the elements.
template <class T>
__device__ __forceinline__ void clear_tokens(const Convolution& p, const Piece& piece,
                                             int64_t first, int64_t step) {
  T* y = static_cast<T*>(p.y) + (piece.row * p.T + piece.start) * p.D;
  const int64_t end = (piece.end - piece.start) * p.D;
  for (int64_t i = first; i < end; i += step) y[i] = from_float<T>(0.f);
}

// A block row (y of the grid) has a sequence; the last one has the tokens after every sequence.
template <class T>
__global__ void __launch_bounds__(kPoolThreads)
    scatter(const __grid_constant__ Convolution p, const __grid_constant__ ConvolutionPool pool) {
  const int64_t size = p.D * p.W, first = int64_t{blockIdx.x} * kPoolThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kPoolThreads;
  const int64_t all = p.N + (p.cu_seqlens.data != nullptr ? 1 : 0);
  for (int64_t n = blockIdx.y; n < all; n += gridDim.y) {
    if (n == p.N) {
      const int64_t start = clamp(index_at(p.cu_seqlens, p.N), 0, p.T);
      clear_tokens<T>(p, {0, -1, start, p.T, start, p.T}, first, step);
      continue;
    }
    const Slots slots = slots_of(pool, n);
    if (slots.from < 0) {
      clear_tokens<T>(p, sequence(p, n), first, step);
    } else if (slots.to >= 0) {
      T* to = static_cast<T*>(pool.state) + slots.to * pool.stride;
      const T* from = static_cast<const T*>(p.state) + n * size;
      for (int64_t i = first; i < size; i += step) to[i] = from[i];
    }
  }
}

unsigned blocks_for(int64_t elements) {
  const int64_t blocks = (elements + kPoolThreads - 1) / kPoolThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < 65535 ? blocks : 65535);
}

}  // namespace

bool takes_convolution_step(const Convolution& p) {
  return p.cu_seqlens.data == nullptr && p.T <= kStepTokens && p.W <= kUnrolledTaps;
}

void convolution_step(const Convolution& p, const ConvolutionPool& pool, cudaStream_t stream) {
  with_taps(p, [&](auto type, auto taps) {
    using T = typename decltype(type)::type;
    const ConvolutionGrid grid = convolution_grid(p.D, 16 / sizeof(T));
    step<T, decltype(taps)::value>
        <<<grid.blocks(p.B, kMostRunBlocks), kConvThreads, 0, stream>>>(p, pool, grid);
  });
}

void gather_caches(const Convolution& p, const ConvolutionPool& pool, void* cache,
                   cudaStream_t stream) {
  if (p.N == 0) return;
  with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    gather<T>
        <<<blocks_for(p.N * p.D * p.W), kPoolThreads, 0, stream>>>(p, pool, static_cast<T*>(cache));
  });
}

void scatter_caches(const Convolution& p, const ConvolutionPool& pool, cudaStream_t stream) {
  const int64_t rows = p.N + 1 < kMostRunBlocks ? p.N + 1 : kMostRunBlocks;
  const dim3 grid(blocks_for(p.D * p.W), static_cast<unsigned>(rows));
  with_dtype(p.dtype, [&](auto type) {
    scatter<typename decltype(type)::type><<<grid, kPoolThreads, 0, stream>>>(p, pool);
  });
}

}  // namespace gla_ext::cuda
