// Where each part of the one workspace of a pass, or of what forward leaves for backward, starts.
#pragma once

#include <cstdint>

#include "cuda/host/params.h"

namespace gla_ext::cuda {

// In bytes; kAbsent: not there.
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
  int64_t prepared = kAbsent;
  int64_t bytes = 0;

  // Appends a part; returns where it starts.
  int64_t add(int64_t part_bytes) {
    constexpr int64_t kAlignment = 256;
    const int64_t start = bytes;
    bytes += (part_bytes + kAlignment - 1) / kAlignment * kAlignment;
    return start;
  }
};

constexpr bool is_there(int64_t start) { return start != Workspace::kAbsent; }

inline int64_t tier_bytes(const ChunkGrid& grid, int64_t H) {
  return grid.B * grid.slots * H * kMaxTierBlocks;
}

// What a step needs that runs by itself: the chunk map, and tiers if asked for.
inline Workspace step_workspace(const ChunkGrid& grid, int64_t H, bool tiers) {
  Workspace w;
  if (grid.packed) {
    w.sequences = w.add((grid.N + 1) * static_cast<int64_t>(sizeof(Sequence)));
    w.chunk_slots = w.add(grid.slots * static_cast<int64_t>(sizeof(ChunkSlot)));
  }
  if (tiers) w.tiers = w.add(tier_bytes(grid, H));
  return w;
}

}  // namespace gla_ext::cuda
