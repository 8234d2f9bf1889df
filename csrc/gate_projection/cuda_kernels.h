// The gate's projection on CUDA: the kernels' arguments, and how the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/params.h"

namespace gla_ext::cuda {

constexpr int64_t kMostGateRank = 16;  // R
constexpr int64_t kMostGateRows = int64_t{1} << 30;
constexpr int64_t kGateBlockColumns = 512;  // of a block in backward

// Absent tensors are null.
struct GateProjection {
  int64_t rows = 0, width = 0;     // width is K
  int rank = 0;                    // R
  DType dtype = DType::kBFloat16;  // of all but the parts
  bool aligned = false;      // R is 16, rows of g and dg start at multiples of 16 bytes, of h of 4
  float per_normalizer = 1;  // 1 / tau
  float clamp_min = 0;       // -inf: none
  float clamp_z = 0;         // z below which g is clamped
  int64_t streams = 1;       // of warps in forward, of blocks in backward, that share the tokens

  const void *h = nullptr, *dg = nullptr;  // [rows, R | K], the last dimension contiguous
  int32_t h_stride = 0, dg_stride = 0;
  const void *weight = nullptr, *bias = nullptr;  // [K, R], [K]
  void *g = nullptr, *dh = nullptr;               // [rows, K | R], contiguous
  float* dh_parts = nullptr;  // [blocks of columns, rows, R], where there are several
  float* parts = nullptr;     // [streams, K R + K], of dweight and dbias
  void *dweight = nullptr, *dbias = nullptr;
};

// The number of blocks of columns in backward.
constexpr int64_t gate_column_blocks(int64_t K) {
  return (K + kGateBlockColumns - 1) / kGateBlockColumns;
}

// h weight bias -> g
void gate_projection_forward(GateProjection p, int multiprocessors, cudaStream_t stream);
// The number of streams of backward. Each leaves a part of dweight and dbias.
int64_t gate_projection_streams(const GateProjection& p, int multiprocessors);
// dg h weight bias -> dh, dweight, dbias
void gate_projection_backward(const GateProjection& p, cudaStream_t stream);

}  // namespace gla_ext::cuda
