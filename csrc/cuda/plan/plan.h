// How a call runs on CUDA: which kernels, over which segments, with which memory. A pure function
// of its shape, layout and GPU; plain C++ without CUDA, in every build.
#pragma once

#include <cstdint>

#include "cuda/host/params.h"
#include "kernels.h"
#include "workspace.h"

namespace gla_ext::cuda {

// kSteps: a kernel a step, any shape and GPU. kFused: the kernels of sm90/, in either pass.
enum class Path : uint8_t { kSteps, kFused };
// What the environment variable GLA_EXT_CUDA_PATH asks for.
enum class PathChoice : uint8_t { kAny, kSteps, kFused };

struct PlanInputs {
  int64_t N = 0, T = 0, H = 0, K = 0, V = 0;  // sequences; tokens of one batch row
  bool packed = false;                        // the N sequences share one row
  DType dtype = DType::kFloat;                // of q, k and v
  DType gate_dtype = DType::kFloat;           // of g
  bool batch_invariant = false;               // neither N, T nor the GPU may change a bit
  bool aligned = true;     // every row of the inputs starts at a multiple of 16 bytes
  bool sm90 = false;       // a GPU of compute capability 9.0, and its kernels are built
  int64_t processors = 1;  // multiprocessors of the GPU
  PathChoice choice = PathChoice::kAny;
  bool key_gated = true;      // g is there
  bool head_gated = false;    // g is one gate a head
  bool gate_gradient = true;  // backward makes that of g
  bool value_gated = false;   // gv is there
  DType value_gate_dtype = DType::kFloat;
  // A pass comes in halves, cut at the scan: the sequences go on on other ranks. Not packed.
  bool in_halves = false;
  bool on_pool = false;       // states are read and written in rows of a pool; forward alone
  bool for_backward = false;  // forward keeps what backward uses again, backward is given it
};

// One direction of a call.
struct PassPlan {
  Recipe kernels;
  Segments segments;
  bool reads_head_gates = false;  // g is read as it is; else one a head is spread over channels
  // How many work items (a segment, head and some values each) a block, or a cluster of two, of
  // forward.small, forward.cluster and states.cluster takes one by one.
  int64_t items_each = 1;
  Workspace workspace;
  // In halves: the first `summary_kernels` kernels make the summary, and what the others read of
  // it.
  int summary_kernels = 0;
  Workspace summary;
  int64_t state_bytes = 0;  // of S and, in backward unless it stays on chip, dS
};

struct CallPlan {
  Path path = Path::kSteps;
  PassPlan forward, backward;
  // What forward leaves for backward, nothing unless asked for: prepared chunks and tiers, and
  // where both passes cut sequences alike, what enters each segment. Never more than the inputs
  // take.
  Workspace for_backward;
};

CallPlan make_plan(const PlanInputs& in);

// Why the fused path does not take such a call, or null.
const char* why_not_fused(const PlanInputs& in);

// The kernels that map packed sequences, and then those of a step that runs by itself.
Recipe step_recipe(const ChunkGrid& grid, std::initializer_list<Kernel> kernels);

// The grid without its pointers.
ChunkGrid make_grid(int64_t N, int64_t T, bool packed);

}  // namespace gla_ext::cuda
