// Every kernel that a call of chunk_gla or of a step may launch: the only table of them. A row is
// the name of the kernel in code, its name in plans and tests, and the function that launches it
// (launch.h, sm90/sm90.h). A recipe is the list of those that a call launches, in order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

// clang-format off
#define GLA_CUDA_KERNELS(ROW)                                                                      \
  /* cu_seqlens -> where packed sequences and their chunks are */                                  \
  ROW(kMapSequences, "map.sequences", map_sequences)                                               \
  ROW(kMapChunks, "map.chunks", map_chunks)                                                        \
  /* the steps, any shape and GPU */                                                               \
  ROW(kGateCumsum, "gate_cumsum", gate_cumsum)                                                     \
  ROW(kChunkTiers, "chunk_tiers", chunk_tiers)                                                     \
  ROW(kChunkStates, "chunk_states", chunk_states)                                                  \
  ROW(kScoresOffDiagonal, "scores_off_diagonal", scores_off_diagonal)                              \
  ROW(kStrongScoresOffDiagonal, "scores_off_diagonal.strong", strong_scores_off_diagonal)          \
  ROW(kScoresDiagonal, "scores_diagonal", scores_diagonal)                                         \
  ROW(kStrongScoresDiagonal, "scores_diagonal.strong", strong_scores_diagonal)                     \
  ROW(kOutput, "output", output)                                                                   \
  ROW(kStateGrads, "state_grads", state_grads)                                                     \
  ROW(kStatesAndStateGrads, "chunk_states + state_grads", states_and_state_grads)                  \
  ROW(kValueGrads, "value_grads", value_grads)                                                     \
  ROW(kScoreGrads, "score_grads", score_grads)                                                     \
  ROW(kIntraGrads, "intra_grads", intra_grads)                                                     \
  ROW(kStrongIntraGrads, "intra_grads.strong", strong_intra_grads)                                 \
  ROW(kMergeGrads, "merge_grads", merge_grads)                                                     \
  /* the steps that gates on values change */                                                      \
  ROW(kValueOperands, "value_operands", value_operands)                                            \
  ROW(kValueGatedStates, "chunk_states.value_gated", value_gated_states)                           \
  ROW(kValueGatedOutput, "output.value_gated", value_gated_output)                                 \
  ROW(kValueGatedStateGrads, "state_grads.value_gated", value_gated_state_grads)                   \
  ROW(kMergeKeyGrads, "merge_grads.value_gated.keys", merge_key_grads)                             \
  ROW(kMergeValueGrads, "merge_grads.value_gated.values", merge_value_grads)                       \
  /* Hopper: prepared chunks, q^ k^ A and the factors of a state */                                \
  ROW(kPrepare, "prepare", sm90::prepare)                                                          \
  ROW(kPrepareWithoutA, "prepare.without_A", sm90::prepare_without_A)                              \
  /* Hopper: what each segment adds to the state and its gradient by itself, and the scan */       \
  ROW(kSummariesFused, "summaries.fused", sm90::summaries_fused)                                   \
  ROW(kSummariesFusedBoth, "summaries.fused.both", sm90::summaries_fused_both)                     \
  ROW(kSummariesCluster, "summaries.cluster", sm90::summaries_cluster)                             \
  ROW(kSummariesClusterWithoutA, "summaries.cluster.without_A", sm90::summaries_cluster_without_A) \
  ROW(kSummariesPacked, "summaries.packed", sm90::summaries_packed)                                \
  ROW(kSummariesPrepared, "summaries.prepared", sm90::summaries_prepared)                          \
  ROW(kSummariesPreparedBoth, "summaries.prepared.both", sm90::summaries_prepared_both)            \
  ROW(kSummariesPreparedGrads, "summaries.prepared.grads", sm90::summaries_prepared_grads)         \
  ROW(kSummariesPreparedGradsAndDecays, "summaries.prepared.grads_and_decays",                     \
      sm90::summaries_prepared_grads_and_decays)                                                   \
  ROW(kScan, "scan", sm90::scan)                                                                   \
  ROW(kScanBoth, "scan.both", sm90::scan_both)                                                     \
  ROW(kScanGrads, "scan.grads", sm90::scan_grads)                                                  \
  ROW(kScanAndStrongA, "scan + strong.A", sm90::scan_and_strong_A)                                 \
  /* Hopper: forward */                                                                            \
  ROW(kForwardFused, "forward.fused", sm90::forward_fused)                                         \
  ROW(kForwardFusedKeeping, "forward.fused.for_backward", sm90::forward_fused_for_backward)        \
  ROW(kForwardSmall, "forward.small", sm90::forward_small)                                         \
  ROW(kForwardCluster, "forward.cluster", sm90::forward_cluster)                                   \
  ROW(kForwardClusterKeeping, "forward.cluster.for_backward", sm90::forward_cluster_for_backward)  \
  ROW(kForwardPrepared, "forward.prepared", sm90::forward_prepared)                                \
  ROW(kForwardPreparedMakingA, "forward.prepared.makes_A", sm90::forward_prepared_makes_A)         \
  ROW(kStrongOutput, "strong.output", sm90::strong_output)                                         \
  ROW(kStrongOutputKeeping, "strong.output.for_backward", sm90::strong_output_for_backward)        \
  /* Hopper: backward */                                                                           \
  ROW(kStatesFused, "states.fused", sm90::states_fused)                                            \
  ROW(kStatesFusedWithoutGrads, "states.fused.without_grads", sm90::states_fused_without_grads)    \
  ROW(kStatesCluster, "states.cluster", sm90::states_cluster)                                      \
  ROW(kStatesPrepared, "states.prepared", sm90::states_prepared)                                   \
  ROW(kStatesPreparedWithoutGrads, "states.prepared.without_grads",                                \
      sm90::states_prepared_without_grads)                                                         \
  ROW(kStatesPreparedChunkPairs, "states.prepared.chunk_pairs", sm90::states_prepared_chunk_pairs) \
  ROW(kStrongGradients, "strong.gradients", sm90::strong_gradients)                                \
  ROW(kStrongGradientsWithoutA, "strong.gradients.without_A", sm90::strong_gradients_without_A)    \
  ROW(kGradientsChunk, "gradients.chunk", sm90::gradients_chunk)                                   \
  ROW(kGradientsChunkPair, "gradients.chunk_pair", sm90::gradients_chunk_pair)                     \
  ROW(kGradientsSweep, "gradients.sweep", sm90::gradients_sweep)                                   \
  ROW(kGradientsSmallSweep, "gradients.small_sweep", sm90::gradients_small_sweep)
// clang-format on

namespace gla_ext::cuda {

enum class Kernel : uint8_t {
#define GLA_ENUMERATOR(kernel, name, launcher) kernel,
  GLA_CUDA_KERNELS(GLA_ENUMERATOR)
#undef GLA_ENUMERATOR
};

constexpr std::array kKernelNames{
#define GLA_NAME(kernel, name, launcher) name,
    GLA_CUDA_KERNELS(GLA_NAME)
#undef GLA_NAME
};

constexpr const char* name_of(Kernel kernel) { return kKernelNames[static_cast<size_t>(kernel)]; }

// With gates on values some kernels run once more over the chunk as its values see it (launch.h).
enum class Side : uint8_t { kKeys, kValues };

class Recipe {
 public:
  struct Entry {
    Kernel kernel;
    Side side;
  };

  Recipe() = default;
  Recipe(std::initializer_list<Kernel> kernels) {
    for (const Kernel kernel : kernels) add(kernel);
  }
  void add(Kernel kernel, Side side = Side::kKeys) {
    entries_[static_cast<size_t>(count_++)] = {kernel, side};
  }
  const Entry* begin() const { return entries_.data(); }
  const Entry* end() const { return entries_.data() + count_; }
  int size() const { return count_; }

 private:
  static constexpr size_t kMost = 24;  // backward of the steps with gates on values has 20
  std::array<Entry, kMost> entries_{};
  int count_ = 0;
};

}  // namespace gla_ext::cuda
