// Kernels over rows, where a thread has eight columns: storing results, and sums over a row's
// threads.
#pragma once

#include "launch.cuh"

namespace gla_ext::cuda {

constexpr int kRowThreads = 256;  // threads of a block
constexpr int kRowWarps = kRowThreads / 32;

// Stores eight results. If a row is written 16 bytes at a time, they are rounded in pairs.
template <Access kAccess, class T>
__device__ __forceinline__ void store_results(T* p, const float (&x)[8], int valid) {
  if constexpr (kAccess == Access::kFast && sizeof(T) == 2) {
    Eight<T> y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, bf16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        y.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        y.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    if (valid > 0) store8(p, y);
  } else {
    store8<kAccess>(p, x, valid);
  }
}

// The sum over kLanes neighbouring lanes of a warp. All of them get the same bits.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Sums over kLanes neighbouring threads of a block; kLanes is a multiple of a warp. Two buffers are
// used in turn, so a sum needs only one barrier.
template <int kLanes>
class WarpSums {
 public:
  // The sum, with the same bits in each thread. All threads of the block must call it.
  __device__ __forceinline__ float operator()(float x, float (&s_warps)[2][kRowWarps]) {
    constexpr int kWarps = kLanes / 32;
    const int warp = threadIdx.x / 32;
    x = sum_of_lanes<32>(x);
    if (threadIdx.x % 32 == 0) s_warps[turn_][warp] = x;
    __syncthreads();  // s_warps[turn_] is written, s_warps[1 - turn_] is read by all
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += s_warps[turn_][warp / kWarps * kWarps + i];
    turn_ = 1 - turn_;
    return sum;
  }

 private:
  int turn_ = 0;
};

}  // namespace gla_ext::cuda
