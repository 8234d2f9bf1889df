// The plan of a call on CUDA: its kernels, segments and memory. It is a pure function of the call's
// shape and layout and of the GPU; plain C++ without CUDA, in every build.
#pragma once

#include <cstdint>

#include "cuda/host/params.h"
#include "kernels.h"
#include "workspace.h"

namespace gla_ext::cuda {

// kSteps: one or two kernels per step, any shape and GPU. kFused: the kernels of sm90/, in at least
// one pass.
enum class Path : uint8_t { kSteps, kFused };
// The value of the environment variable GLA_EXT_CUDA_PATH.
enum class PathChoice : uint8_t { kAny, kSteps, kFused };

struct PlanInputs {
  int64_t N = 0, T = 0, H = 0, K = 0, V = 0;  // sequences; tokens of one batch row
  bool packed = false;                        // the N sequences share one row
  DType dtype = DType::kFloat;                // of q, k and v
  DType gate_dtype = DType::kFloat;           // of g
  bool batch_invariant = false;               // bits do not depend on N, T or the GPU
  bool aligned = true;     // every row of the inputs starts at a multiple of 16 bytes
  bool sm90 = false;       // a GPU of compute capability 9.0, and its kernels are built
  int64_t processors = 1;  // multiprocessors of the GPU
  PathChoice choice = PathChoice::kAny;
  bool key_gated = true;      // g is given
  bool head_gated = false;    // g has one gate per head
  bool gate_gradient = true;  // backward computes dg
  bool value_gated = false;   // gv is given
  DType value_gate_dtype = DType::kFloat;
  // Each pass runs in two halves, cut at the scan: the sequences continue on other ranks. Not
  // packed.
  bool in_halves = false;
  bool on_pool = false;       // states are read and written in rows of a pool; forward alone
  bool for_backward = false;  // forward stores results that backward is given
};

// One direction of a call.
struct PassPlan {
  Recipe kernels;
  Segments segments;
  bool reads_head_gates = false;  // g is read as it is; else a gate per head is copied to channels
  // How many work items a block, or a cluster of two, of forward.small, forward.cluster and
  // states.cluster takes, one after another. An item is a segment, a head and some values.
  int64_t items_each = 1;
  Workspace workspace;
  // In halves: the first `summary_kernels` kernels make the summary. `summary` holds it, and those
  // of their other results that the remaining kernels read.
  int summary_kernels = 0;
  Workspace summary;
  int64_t state_bytes = 0;  // of S and, in backward, dS (0 if it stays on chip)
};

struct CallPlan {
  Path path = Path::kSteps;
  PassPlan forward, backward;
  // What forward stores for backward if `for_backward`: prepared chunks, tiers and, if both passes
  // cut sequences alike, the state that enters each segment. Never more bytes than the inputs.
  Workspace for_backward;
};

CallPlan make_plan(const PlanInputs& in);

// The reason why the fused path cannot run such a call, or null.
const char* why_not_fused(const PlanInputs& in);

// The kernels that map packed sequences, followed by those of a step that runs on its own.
Recipe step_recipe(const ChunkGrid& grid, std::initializer_list<Kernel> kernels);

// The grid without its pointers.
ChunkGrid make_grid(int64_t N, int64_t T, bool packed);

}  // namespace gla_ext::cuda
