// How a call runs on CUDA: a pure function of its shape. Plain C++ without CUDA, in every build.
#pragma once

#include <cstdint>

#include "params.h"

namespace gla_ext::cuda {

struct PlanInputs {
  int64_t N, T, H, K, V;  // sequences; tokens of one batch row
  bool packed;            // the N sequences share one row
  DType dtype;            // of q, k and v
  DType gate_dtype;       // of g
  bool backward;
  bool save_states;  // forward returns S, backward is given it
};

// Where each part of the one workspace starts, in bytes; kAbsent: not needed.
struct Workspace {
  static constexpr int64_t kAbsent = -1;
  int64_t sequences = kAbsent, chunk_slots = kAbsent, tiers = kAbsent;
  int64_t b = kAbsent, b_suffix = kAbsent;
  int64_t A = kAbsent, dA = kAbsent, S = kAbsent, dS = kAbsent;
  int64_t dq_intra = kAbsent, dk_intra = kAbsent, dg_intra = kAbsent;
  int64_t bytes = 0;
};

struct Plan {
  const char* path;
  const char* mode;
  Workspace workspace;
  int64_t state_bytes;  // of S and, in backward, dS: in the workspace, or S as it is saved
  int64_t launches;     // kernels
};

// What A, dA, S and dS are kept in between kernels: what the products round to anyway.
constexpr DType intermediate_dtype(DType inputs) {
  return inputs == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat;
}
constexpr int64_t bytes_of(DType t) { return t == DType::kFloat ? 4 : 2; }

// The grid without its pointers.
ChunkGrid make_grid(int64_t N, int64_t T, bool packed);

Plan make_plan(const PlanInputs& in);

// What a step needs that runs by itself: the chunk map, and tiers if asked for.
Workspace step_workspace(const ChunkGrid& grid, int64_t H, bool tiers);

}  // namespace gla_ext::cuda
