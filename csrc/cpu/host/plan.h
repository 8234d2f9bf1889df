// The plan of a call on CPU: a pure function of its shape and the number of threads.
#pragma once

#include <cstdint>

namespace gla_ext::cpu {

enum class Mode {
  kSweep,  // non-materialised: one worker sweeps a whole (sequence, head), the state stays on it
  kMaterialised,  // the states of every chunk are written first, then chunks run in parallel
};

struct PlanInputs {
  int64_t N, T, H, K, V;  // sequences; tokens of one batch row
  bool packed;            // the N sequences share one row
  bool backward;
  bool value_gated = false;           // gates on values too
  int64_t state_bytes_each = 4;       // of an element of S: 2 for bf16 inputs, 8 for fp64
  int64_t accumulate_bytes_each = 4;  // of an element of dS and of the tiles: 8 for fp64
};

struct Plan {
  Mode mode;
  int64_t threads;          // workers that have work
  int64_t tasks;            // of the parallel part: (sequence, head) or (chunk, head)
  int64_t workspace_bytes;  // of all workers; packed: at most, as if one sequence had every token
  int64_t state_bytes;      // of materialised S and, in backward, dS'
};

// The environment variable GLA_EXT_CPU_MODE=sweep|materialised overrides the mode; both give the
// same bits.
Plan make_plan(const PlanInputs& in, int64_t threads);

}  // namespace gla_ext::cpu
