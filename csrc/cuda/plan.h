// How a call runs on CUDA: a pure function of its shape, layout and GPU. Plain C++ without CUDA, in
// every build.
#pragma once

#include <cstdint>

#include "params.h"

namespace gla_ext::cuda {

// kSteps: a kernel a step, any shape and GPU. kFused: the kernels of sm90/.
enum class Path : uint8_t { kSteps, kFused };
// What the environment variable GLA_EXT_CUDA_PATH asks for.
enum class PathChoice : uint8_t { kAny, kSteps, kFused };

struct PlanInputs {
  int64_t N, T, H, K, V;  // sequences; tokens of one batch row
  bool packed;            // the N sequences share one row
  DType dtype;            // of q, k and v
  DType gate_dtype;       // of g
  bool backward;
  bool batch_invariant;  // neither N, T nor the GPU may change a bit
  bool aligned;          // every row of the inputs starts at a multiple of 16 bytes
  bool sm90;             // a GPU of compute capability 9.0, and its kernels are built
  int64_t processors;    // multiprocessors of the GPU
  PathChoice choice;
  bool key_gated = true;     // g is there
  bool value_gated = false;  // gv is there
  DType value_gate_dtype = DType::kFloat;
  bool kept = false;  // forward keeps what backward uses again, backward is given it
};

// Where each part of the one workspace, or of what is kept, starts, in bytes; kAbsent: not there.
struct Workspace {
  static constexpr int64_t kAbsent = -1;
  int64_t sequences = kAbsent, chunk_slots = kAbsent, tiers = kAbsent;
  int64_t by_last_segment = kAbsent, totals = kAbsent;
  int64_t b = kAbsent, b_suffix = kAbsent;
  int64_t A = kAbsent, dA = kAbsent, S = kAbsent, dS = kAbsent;
  int64_t dq_intra = kAbsent, dk_intra = kAbsent, dg_intra = kAbsent;
  int64_t no_decay = kAbsent;  // b without gates: one row of zeros
  // With gates on values:
  int64_t bv = kAbsent, bv_suffix = kAbsent, value_tiers = kAbsent;
  int64_t v_out = kAbsent, do_in = kAbsent;
  int64_t o_intra = kAbsent, dv_intra = kAbsent, dgv_intra = kAbsent;
  int64_t segment_states = kAbsent, segment_state_grads = kAbsent, segment_decays = kAbsent;
  int64_t operands = kAbsent;
  int64_t bytes = 0;
};

struct Plan {
  Path path = Path::kSteps;
  bool linear = false;           // sweeps go over operands in memory, which are made first
  bool swept_gradients = false;  // dS stays on chip, in a sweep that makes all gradients
  bool paired_states = false;    // operands and S are made in one pass, by pairs of blocks
  bool paired_parts = false;     // operands and segments' own parts of S are
  bool packed_parts = false;     // segments' own parts of S are, of packed sequences, without these
  bool paired_chunks = false;    // gradients of two chunks are made from one S and one dS
  bool scores = false;           // operands that this pass makes first have A of chunks in tier 1
  int64_t cluster_pieces = 0;    // of pairs of blocks, as in Problem
  int64_t block_pieces = 1;      // as in Problem
  Workspace workspace;
  // What backward uses again: operands and tiers, and where both passes cut sequences alike, what
  // enters each segment. Nothing unless asked for, nor where backward makes no operands, or forward
  // none in memory but where gradients of whole or packed sequences are swept, which take those it
  // has on chip.
  Workspace kept;
  // As in ChunkGrid.
  int64_t segments = 0, segment_chunks = 0, segment_states = 0, parts_at_once = 0;
  bool prefixed = false;
  // Of S and, in backward unless it stays on chip, dS.
  int64_t state_bytes = 0;
  int64_t launches = 0;  // kernels
};

// What A, dA, S and dS are kept in between kernels: what the products round to anyway.
constexpr DType intermediate_dtype(DType inputs) {
  return inputs == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat;
}
// fp16 has too few exponents for values that gates have scaled: beside gates on values its tensors
// become fp32, and are multiplied in tf32 as fp16 is.
constexpr bool becomes_fp32(DType inputs, bool value_gated) {
  return inputs == DType::kHalf && value_gated;
}
constexpr int64_t bytes_of(DType t) { return t == DType::kFloat ? 4 : 2; }

// The grid without its pointers.
ChunkGrid make_grid(int64_t N, int64_t T, bool packed);

// Why the fused path does not take such a call, or null.
const char* why_not_fused(const PlanInputs& in);

Plan make_plan(const PlanInputs& in);

// What a step needs that runs by itself: the chunk map, and tiers if asked for.
Workspace step_workspace(const ChunkGrid& grid, int64_t H, bool tiers);

}  // namespace gla_ext::cuda
