// The only table of kernels: all that a call of chunk_gla or of a step may launch. A row holds the
// kernel's name in the code, its name in plans and tests, and the function that launches it
// (host/launchers.h, sm90/sm90.h, sm90/head_gates/head_gates.h). A recipe lists the kernels that a
// call launches, in order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

// clang-format off
#define GLA_CUDA_KERNELS(ROW)                                                                     \
  /* cu_seqlens -> where packed sequences and their chunks are */                                 \
  ROW(kMapSequences, "map_sequences", launch_map_sequences)                                       \
  ROW(kMapChunks, "map_chunks", launch_map_chunks)                                                \
  /* the steps, any shape and GPU */                                                              \
  ROW(kGateCumsum, "gate_cumsum", launch_gate_cumsum)                                             \
  ROW(kChunkTiers, "chunk_tiers", launch_chunk_tiers)                                             \
  ROW(kChunkStates, "chunk_states", launch_chunk_states)                                          \
  ROW(kScoresOffDiagonal, "scores_off_diagonal", launch_scores_off_diagonal)                      \
  ROW(kStrongScoresOffDiagonal, "strong_scores_off_diagonal", launch_strong_scores_off_diagonal)  \
  ROW(kScoresDiagonal, "scores_diagonal", launch_scores_diagonal)                                 \
  ROW(kStrongScoresDiagonal, "strong_scores_diagonal", launch_strong_scores_diagonal)             \
  ROW(kOutput, "output", launch_output)                                                           \
  ROW(kStateGrads, "state_grads", launch_state_grads)                                             \
  ROW(kStatesAndStateGrads, "states_and_state_grads", launch_states_and_state_grads)              \
  /* the steps, if sequences are cut: what each segment adds by itself, and the scan */           \
  ROW(kChunkStatesSummaries, "chunk_states.summaries", launch_chunk_states_summaries)             \
  ROW(kStateGradsSummaries, "state_grads.summaries", launch_state_grads_summaries)                \
  ROW(kStatesAndStateGradsSummaries, "states_and_state_grads.summaries",                          \
      launch_states_and_state_grads_summaries)                                                    \
  ROW(kSegmentScan, "segment_scan", launch_segment_scan)                                          \
  ROW(kValueGrads, "value_grads", launch_value_grads)                                             \
  ROW(kScoreGrads, "score_grads", launch_score_grads)                                             \
  ROW(kIntraGrads, "intra_grads", launch_intra_grads)                                             \
  ROW(kStrongIntraGrads, "strong_intra_grads", launch_strong_intra_grads)                         \
  ROW(kMergeGrads, "merge_grads", launch_merge_grads)                                             \
  /* the steps that gates on values change */                                                     \
  ROW(kGateValues, "gate_values", launch_gate_values)                                             \
  ROW(kValueGatedStates, "value_gated_states", launch_value_gated_states)                         \
  ROW(kValueGatedOutput, "value_gated_output", launch_value_gated_output)                         \
  ROW(kValueGatedStateGrads, "value_gated_state_grads", launch_value_gated_state_grads)           \
  ROW(kMergeKeyGrads, "merge_key_grads", launch_merge_key_grads)                                  \
  ROW(kMergeValueGrads, "merge_value_grads", launch_merge_value_grads)                            \
  /* Hopper: one gate a head, or none; sums of gates, summaries, sweeps */                        \
  ROW(kHeadGateSums, "head_gates.sums", sm90::launch_head_gate_sums)                              \
  ROW(kHeadGateSummaries, "head_gates.summaries", sm90::launch_head_gate_summaries)               \
  ROW(kHeadGateSummariesOfGrads, "head_gates.summaries.of_grads",                                 \
      sm90::launch_head_gate_summaries_of_grads)                                                  \
  ROW(kHeadGateForward, "head_gates.forward", sm90::launch_head_gate_forward)                     \
  ROW(kHeadGateQueryGrads, "head_gates.query_grads", sm90::launch_head_gate_query_grads)          \
  ROW(kHeadGateKeyGrads, "head_gates.key_grads", sm90::launch_head_gate_key_grads)                \
  ROW(kHeadGateQueryGradsAndDots, "head_gates.query_grads.and_dots",                              \
      sm90::launch_head_gate_query_grads_and_dots)                                                \
  ROW(kHeadGateKeyGradsAndDots, "head_gates.key_grads.and_dots",                                  \
      sm90::launch_head_gate_key_grads_and_dots)                                                  \
  ROW(kHeadGateGateGrads, "head_gates.gate_grads", sm90::launch_head_gate_gate_grads)             \
  ROW(kHeadGateValueGrads, "head_gates.value_grads", sm90::launch_head_gate_value_grads)          \
  /* Hopper: prepared chunks, q^ k^ A and the factors of a state */                               \
  ROW(kPrepare, "prepare", sm90::launch_prepare)                                                  \
  ROW(kPrepareWithoutA, "prepare.without_A", sm90::launch_prepare_without_A)                      \
  /* Hopper: what each segment adds to the state and its gradient by itself, and the scan */      \
  ROW(kSummariesFused, "states.fused.summaries", sm90::launch_summaries_fused)                    \
  ROW(kSummariesFusedBoth, "states.fused.summaries_both", sm90::launch_summaries_fused_both)      \
  ROW(kSummariesCluster, "states.cluster.summaries", sm90::launch_summaries_cluster)              \
  ROW(kSummariesClusterWithoutA, "states.cluster.summaries_without_A",                            \
      sm90::launch_summaries_cluster_without_A)                                                   \
  ROW(kSummariesPacked, "states.cluster.packed_summaries", sm90::launch_summaries_packed)         \
  ROW(kSummariesPrepared, "states.prepared.summaries", sm90::launch_summaries_prepared)           \
  ROW(kSummariesPreparedBoth, "states.prepared.summaries_both",                                   \
      sm90::launch_summaries_prepared_both)                                                       \
  ROW(kSummariesPreparedGrads, "states.prepared.summaries_of_grads",                              \
      sm90::launch_summaries_prepared_grads)                                                      \
  ROW(kSummariesPreparedGradsAndDecays, "states.prepared.summaries_of_grads_and_decays",          \
      sm90::launch_summaries_prepared_grads_and_decays)                                           \
  ROW(kScan, "scan", sm90::launch_scan)                                                           \
  ROW(kScanBoth, "scan.both", sm90::launch_scan_both)                                             \
  ROW(kScanGrads, "scan.grads", sm90::launch_scan_grads)                                          \
  ROW(kScanAndStrongA, "scan.and_strong_A", sm90::launch_scan_and_strong_A)                       \
  ROW(kFold, "fold", sm90::launch_fold)                                                           \
  ROW(kFoldGrads, "fold.grads", sm90::launch_fold_grads)                                          \
  ROW(kFoldAndStrongA, "fold.and_strong_A", sm90::launch_fold_and_strong_A)                       \
  ROW(kFoldGradsAndStrongA, "fold.and_strong_A.grads", sm90::launch_fold_grads_and_strong_A)      \
  /* Hopper: forward */                                                                           \
  ROW(kForwardFused, "forward.fused", sm90::launch_forward_fused)                                 \
  ROW(kForwardFusedForBackward, "forward.fused.for_backward",                                     \
      sm90::launch_forward_fused_for_backward)                                                    \
  ROW(kForwardSmall, "forward.small", sm90::launch_forward_small)                                 \
  ROW(kForwardCluster, "forward.cluster", sm90::launch_forward_cluster)                           \
  ROW(kForwardClusterForBackward, "forward.cluster.for_backward",                                 \
      sm90::launch_forward_cluster_for_backward)                                                  \
  ROW(kForwardPrepared, "forward.prepared", sm90::launch_forward_prepared)                        \
  ROW(kForwardPreparedMakingA, "forward.prepared.makes_A", sm90::launch_forward_prepared_makes_A) \
  ROW(kStrongOutput, "strong.output", sm90::launch_strong_output)                                 \
  ROW(kStrongOutputForBackward, "strong.output.for_backward",                                     \
      sm90::launch_strong_output_for_backward)                                                    \
  /* Hopper: backward */                                                                          \
  ROW(kStatesFused, "states.fused", sm90::launch_states_fused)                                    \
  ROW(kStatesFusedWithoutGrads, "states.fused.without_grads",                                     \
      sm90::launch_states_fused_without_grads)                                                    \
  ROW(kStatesCluster, "states.cluster", sm90::launch_states_cluster)                              \
  ROW(kStatesPrepared, "states.prepared", sm90::launch_states_prepared)                           \
  ROW(kStatesPreparedWithoutGrads, "states.prepared.without_grads",                               \
      sm90::launch_states_prepared_without_grads)                                                 \
  ROW(kStatesPreparedChunkPairs, "states.prepared.chunk_pairs",                                   \
      sm90::launch_states_prepared_chunk_pairs)                                                   \
  ROW(kStrongGradients, "strong.gradients", sm90::launch_strong_gradients)                        \
  ROW(kStrongGradientsWithoutA, "strong.gradients.without_A",                                     \
      sm90::launch_strong_gradients_without_A)                                                    \
  ROW(kGradientsChunk, "gradients.chunk", sm90::launch_gradients_chunk)                           \
  ROW(kGradientsChunkPair, "gradients.chunk_pair", sm90::launch_gradients_chunk_pair)             \
  ROW(kGradientsSweep, "gradients.sweep", sm90::launch_gradients_sweep)                           \
  ROW(kGradientsSmallSweep, "gradients.small_sweep", sm90::launch_gradients_small_sweep)
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

// With gates on values, some kernels run a second time, for the value side (launchers.h).
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
