// Cross entropy as csrc/common/cross_entropy.h defines it. For a row with logits x and label y:
//   lse = log sum(exp s)      loss = lse − (1 − ls) s_y − ls mean(s) + z lse²
// Backward, with p = exp(s − lse):
//   dx = dloss ((1 + 2 z lse) p − ls / V − (1 − ls) [i = y]) ds/dx
//
// grid    a block per row; a thread has kAtOnce times eight logits, a block's width apart
// reads   x [N, V], y [N]; backward dloss, lse [N]
// writes  loss, z lse², lse [N]; dx [N, V], which may overwrite x
// Sums are fp32, in an order that depends only on V; dx is rounded once. A row that does not count
// is not read. The kernel that computes loss and gradient reads a row twice, the second time from
// the L2 cache.
#include "cuda/device/rows.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda::cross_entropy {
namespace {

constexpr int kThreads = kRowThreads;
// How many times eight logits a thread loads at once.
template <class T>
constexpr int kAtOnce = sizeof(T) == 2 ? 4 : 2;
constexpr int kStep = 8 * kThreads;  // columns of a block at a time

enum class Pass { kLoss, kGradient, kBoth };

// Calls f(column, x) for each eight logits of a row that this thread has; x is in the format of
// memory.
template <Access kAccess, class T, class F>
__device__ __forceinline__ void for_row(const T* row, int64_t width, F&& f) {
  for (int64_t first = threadIdx.x * 8; first < width; first += kAtOnce<T> * kStep) {
    Eight<T> x[kAtOnce<T>];
#pragma unroll
    for (int i = 0; i < kAtOnce<T>; ++i) {
      const int64_t left = width - first - i * kStep;
      x[i] = load8<kAccess>(row + first + i * kStep, left < 8 ? static_cast<int>(left) : 8);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce<T>; ++i)
      if (first + i * kStep < width) f(first + i * kStep, x[i]);
  }
}

// Returns s; sets `slope` to ds/dx.
__device__ __forceinline__ float scaled(const CrossEntropy& p, float x, float& slope) {
  slope = p.scale;
  x *= p.scale;
  if (p.cap == 0.f) return x;
  const float t = tanhf(x * p.per_cap);
  slope = p.scale * (1.f - t * t);
  return p.cap * t;
}

// The sums of a thread over its part of a row: the largest s, the sum of exp(s - largest), and the
// sum of s.
struct Part {
  float most = -INFINITY, sum = 0.f, total = 0.f;

  // Subtracts nothing in a part that is empty or whose elements are all -inf.
  __device__ __forceinline__ static float base(float most) {
    return most == -INFINITY ? 0.f : most;
  }

  __device__ __forceinline__ void add(const float (&s)[8], int valid) {
    float largest = most;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) largest = fmaxf(largest, s[i]);
    const float from = base(largest);
    sum *= exp2_ftz((base(most) - from) * kLog2E);
    most = largest;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) {
        sum += exp2_ftz((s[i] - from) * kLog2E);
        total += s[i];
      }
  }
};

__device__ __forceinline__ float max_of_block(float x, float (&s_warps)[kRowWarps]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  if (threadIdx.x % 32 == 0) s_warps[threadIdx.x / 32] = x;
  __syncthreads();  // s_warps is written
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) x = fmaxf(x, s_warps[i]);
  return x;
}

// Every thread gets lse; the first one stores the loss.
template <Access kAccess, class T>
__device__ __forceinline__ float loss_of_row(const CrossEntropy& p, const T* x, int64_t label) {
  __shared__ float s_most[kRowWarps], s_sums[2][kRowWarps];
  WarpSums<kThreads> sum_of_block;
  Part part;
  for_row<kAccess>(x, p.width, [&](int64_t column, const Eight<T>& eight) {
    float s[8], slope;
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = scaled(p, eight[i], slope);
    const int64_t left = p.width - column;
    part.add(s, left < 8 ? static_cast<int>(left) : 8);
  });
  const float most = Part::base(max_of_block(part.most, s_most));
  const float sum =
      sum_of_block(part.sum * exp2_ftz((Part::base(part.most) - most) * kLog2E), s_sums);
  const float total = p.smoothing == 0.f ? 0.f : sum_of_block(part.total, s_sums);
  const float lse = most + logf(sum);
  if (threadIdx.x == 0) {
    float slope;
    const float s = scaled(p, to_float(x[label]), slope);
    const float z_loss = p.square * lse * lse;
    const float mean = total * p.per_width;
    // Formed from differences to lse, so that a common offset of all logits is not rounded.
    const float loss =
        (1.f - p.smoothing) * (lse - s) + (p.smoothing == 0.f ? 0.f : p.smoothing * (lse - mean));
    p.loss[blockIdx.x] = loss + z_loss;
    if (p.z_loss != nullptr) p.z_loss[blockIdx.x] = z_loss;
    if (p.lse != nullptr) p.lse[blockIdx.x] = lse;
  }
  return lse;
}

template <Access kAccess, class T>
__device__ __forceinline__ void gradient_of_row(const CrossEntropy& p, const T* x, int64_t label,
                                                float lse, float dloss) {
  T* dx = static_cast<T*>(p.dlogits) + blockIdx.x * p.dlogits_stride;
  const float of_p = 1.f + 2.f * p.square * lse;
  const float uniform = p.smoothing * p.per_width;
  for_row<kAccess>(x, p.width, [&](int64_t column, const Eight<T>& eight) {
    float d[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float slope;
      const float s = scaled(p, eight[i], slope);
      float of_s = of_p * exp2_ftz((s - lse) * kLog2E) - uniform;
      if (column + i == label) of_s -= 1.f - p.smoothing;
      d[i] = dloss * of_s * slope;
    }
    const int64_t left = p.width - column;
    store_results<kAccess>(dx + column, d, left < 8 ? static_cast<int>(left) : 8);
  });
}

template <Access kAccess, class T>
__device__ __forceinline__ void clear_row(const CrossEntropy& p) {
  T* dx = static_cast<T*>(p.dlogits) + blockIdx.x * p.dlogits_stride;
  const float zeros[8] = {};
  for (int64_t column = threadIdx.x * 8; column < p.width; column += kStep) {
    const int64_t left = p.width - column;
    store_results<kAccess>(dx + column, zeros, left < 8 ? static_cast<int>(left) : 8);
  }
}

template <class T, Access kAccess, Pass kPass>
__global__ void __launch_bounds__(kThreads) run_rows(const __grid_constant__ CrossEntropy p) {
  const int64_t row = blockIdx.x, label = p.target[row];
  const T* x = static_cast<const T*>(p.logits) + row * p.stride;
  if (label == p.ignored) {
    if constexpr (kPass != Pass::kLoss) clear_row<kAccess, T>(p);
    if (kPass == Pass::kGradient || threadIdx.x != 0) return;
    p.loss[row] = 0.f;
    if (p.z_loss != nullptr) p.z_loss[row] = 0.f;
    if (p.lse != nullptr) p.lse[row] = 0.f;
    return;
  }
  if (label < 0 || label >= p.width)
    __assert_fail("cross_entropy: expected labels from 0 to V - 1, or ignore_index", __FILE__,
                  __LINE__, __func__);
  if constexpr (kPass == Pass::kGradient) {
    gradient_of_row<kAccess>(p, x, label, p.lse[row], p.dloss[row * p.dloss_stride]);
  } else {
    const float lse = loss_of_row<kAccess>(p, x, label);
    if constexpr (kPass == Pass::kBoth) {
      __syncthreads();  // the label's logit is read before it is overwritten
      gradient_of_row<kAccess>(p, x, label, lse, 1.f);
    }
  }
}

template <Pass kPass>
void launch_rows(const CrossEntropy& p, cudaStream_t stream) {
  with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto grid = static_cast<unsigned>(p.rows);
    if (p.aligned)
      run_rows<T, Access::kFast, kPass><<<grid, kThreads, 0, stream>>>(p);
    else
      run_rows<T, Access::kGeneral, kPass><<<grid, kThreads, 0, stream>>>(p);
  });
}

}  // namespace
}  // namespace gla_ext::cuda::cross_entropy

namespace gla_ext::cuda {

void cross_entropy_forward(const CrossEntropy& p, cudaStream_t stream) {
  cross_entropy::launch_rows<cross_entropy::Pass::kLoss>(p, stream);
}

void cross_entropy_backward(const CrossEntropy& p, cudaStream_t stream) {
  cross_entropy::launch_rows<cross_entropy::Pass::kGradient>(p, stream);
}

void cross_entropy_with_grad(const CrossEntropy& p, cudaStream_t stream) {
  cross_entropy::launch_rows<cross_entropy::Pass::kBoth>(p, stream);
}

}  // namespace gla_ext::cuda
