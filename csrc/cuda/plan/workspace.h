// Where each buffer starts in the one allocation of a pass, or of forward's results for backward.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/host/params.h"

namespace gla_ext::cuda {

// The buffers that a call may have besides its inputs and outputs. `Call::place` assigns each to
// its field of Problem.
enum class Buffer : uint8_t {
  // packed sequences
  kSequences,
  kChunkEntries,
  kByLastSegment,
  kCutSequences,
  kTotals,
  // the steps
  kTiers,
  kB,
  kBSuffix,
  kNoDecay,  // b without gates: one row of zeros
  kA,
  kDA,
  kS,
  kDS,
  kDqIntra,
  kDkIntra,
  kDgIntra,
  // the steps with gates on values
  kBv,
  kBvSuffix,
  kValueTiers,
  kVOut,
  kDoIn,
  kOIntra,
  kDvIntra,
  kDgvIntra,
  // segments and prepared chunks of the fused path
  kSegmentStates,
  kSegmentStateGrads,
  kSegmentDecays,
  kPrepared,
  // what the first half of a pass leaves for the second, besides the last two above
  kSummaries,
  kSummaryGrads,
};
constexpr int kBuffers = static_cast<int>(Buffer::kSummaryGrads) + 1;

class Workspace {
 public:
  Workspace() { starts_.fill(kAbsent); }

  // Appends a buffer.
  void add(Buffer buffer, int64_t bytes) {
    constexpr int64_t kAlignment = 256;
    at(buffer) = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // A buffer in the place of another, which is no longer read when this one is written.
  void reuse(Buffer buffer, Buffer other) { at(buffer) = start(other); }

  // Makes a buffer absent, although its bytes stay.
  void hide(Buffer buffer) { at(buffer) = kAbsent; }

  bool has(Buffer buffer) const { return start(buffer) != kAbsent; }
  int64_t start(Buffer buffer) const { return starts_[static_cast<size_t>(buffer)]; }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAbsent = -1;
  int64_t& at(Buffer buffer) { return starts_[static_cast<size_t>(buffer)]; }
  std::array<int64_t, kBuffers> starts_;
  int64_t bytes_ = 0;
};

inline int64_t tier_bytes(const ChunkGrid& grid, int64_t H) {
  return grid.B * grid.entries * H * kMaxTierBlocks;
}

// The workspace of a step that runs on its own: the chunk map of packed sequences and, if `tiers`,
// the tiers.
inline Workspace step_workspace(const ChunkGrid& grid, int64_t H, bool tiers) {
  Workspace w;
  if (grid.packed) {
    w.add(Buffer::kSequences, (grid.N + 1) * static_cast<int64_t>(sizeof(Sequence)));
    w.add(Buffer::kChunkEntries, grid.entries * static_cast<int64_t>(sizeof(ChunkEntry)));
  }
  if (tiers) w.add(Buffer::kTiers, tier_bytes(grid, H));
  return w;
}

}  // namespace gla_ext::cuda
