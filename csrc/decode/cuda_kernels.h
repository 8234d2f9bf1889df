// Linear maps of the few rows of a decoded token, as the host calls their kernel: plain structs, no
// torch header.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/params.h"

namespace gla_ext::cuda {

constexpr int kMostDecodeRows = 32;
constexpr int kMostMaps = 6;     // of one input
constexpr int kDecodeStep = 32;  // columns that a warp takes at once; D is a multiple
constexpr int kMostDecodeColumns = 1 << 16;

// The step before the maps: nothing, the norm of each row, or of each head with its gate.
enum class Before : uint8_t { kNothing, kNorm, kGatedNorm };
// The step after the maps: store the products, silu(gate) * up, or the sum with the residual.
enum class After : uint8_t { kStore, kSwiglu, kAddResidual };

struct LinearMap {
  const void* weight = nullptr;  // [width, D], contiguous
  void* y = nullptr;             // [rows, width], contiguous
  int32_t width = 0;
  int32_t first_tile = 0;  // of 16 rows of the weights, 8 with kSwiglu
};

// Absent tensors are null. Rows of x and gate start at multiples of 16 bytes.
struct DecodeLinear {
  DType dtype = DType::kBFloat16;  // of all but the norm's weight
  int32_t rows = 0, D = 0;
  const void *x = nullptr, *gate = nullptr;  // [rows, D]
  int32_t x_stride = 0, gate_stride = 0;

  const void* norm_weight = nullptr;  // [group]
  DType norm_dtype = DType::kFloat;
  int32_t group = 0;  // columns that are normed together, a divisor of D, a multiple of 32
  float eps = 0, per_group = 0;

  LinearMap maps[kMostMaps];
  int32_t count = 0, tiles = 0;    // maps, their tiles
  const void* up = nullptr;        // as maps[0].weight, kSwiglu only
  const void* residual = nullptr;  // [rows, maps[0].width]
  int32_t residual_stride = 0;
  int32_t processors = 1;  // multiprocessors of the GPU
  bool overlaps = false;   // may start before the previous kernel has ended
  bool clusters = false;   // the GPU has clusters, and the build has code for it
};

// Shared memory of a block.
size_t decode_linear_bytes(const DecodeLinear& p, Before before);
constexpr size_t kMostDecodeBytes = 96 << 10;

// x norm_weight weights -> y of each map
void decode_norm_linear(const DecodeLinear& p, cudaStream_t stream);
// x norm_weight weight up -> y
void decode_norm_swiglu(const DecodeLinear& p, cudaStream_t stream);
// x weight residual -> y
void decode_linear_residual(const DecodeLinear& p, cudaStream_t stream);
// x gate norm_weight weight residual -> y
void decode_norm_gate_linear_residual(const DecodeLinear& p, cudaStream_t stream);

}  // namespace gla_ext::cuda
