#include "plan.h"

#include <algorithm>

#include "plan_segments.h"

namespace gla_ext::cuda {
namespace {

constexpr int64_t kPartAlignment = 256;  // bytes
constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

// The start of a new part at the end of the workspace.
int64_t add(Workspace& w, int64_t bytes) {
  const int64_t start = w.bytes;
  w.bytes += (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  return start;
}

int64_t tier_bytes(const ChunkGrid& grid, int64_t H) {
  return grid.B * grid.slots * H * kMaxTierBlocks;
}

void add_segments(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  const int64_t segment_heads = grid.B * plan.segment_states * in.H;
  if (segment_heads == 0) return;
  const int64_t states = segment_heads * in.K * in.V * kFloatBytes;
  Workspace& w = plan.workspace;
  if (plan.kept.segment_decays == Workspace::kAbsent)
    w.segment_decays = add(w, segment_heads * in.K * kFloatBytes);
  if (plan.kept.segment_states == Workspace::kAbsent) w.segment_states = add(w, states);
  if (in.backward) w.segment_state_grads = add(w, states);
  plan.launches += 2;
}

int64_t all_operand_bytes(const PlanInputs& in, const ChunkGrid& grid) {
  return grid.B * grid.slots * in.H * operand_bytes(in.K);
}

// Sweeps over ready operands: where those that gate do not reach, or would gate
// a chunk twice, for the segments' own parts or the gradients and for what follows. Of packed
// sequences most have one segment: there sweeps gate, unless backward has gradients that need sums
// of gates of which every bit is operands.cu's.
void choose_operands(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  const bool gates = in.K <= kOperandKeys && in.gate_dtype == DType::kBFloat16 && !in.backward;
  plan.packed_parts = in.K > kTierBlock && gates && in.packed && plan.segments > 0 &&
                      backward_sweep(in, grid).swept_gradients;
  plan.linear = in.K > kTierBlock && !(gates && (plan.segments == 0 || plan.packed_parts));
  if (plan.linear && plan.kept.operands == Workspace::kAbsent)
    plan.workspace.operands = add(plan.workspace, all_operand_bytes(in, grid));
}

// Whether pairs of blocks gate for each other: heads of more values than one block's.
bool is_paired(const PlanInputs& in) {
  return in.K > kTierBlock && in.K <= kOperandKeys && in.gate_dtype == DType::kBFloat16 &&
         ceil_div(in.V, kFusedValues) % 2 == 0;
}

// How many pieces, of a segment, head and some values each, one of so many places takes: as many as
// let the last one end soonest; where it goes on to another, that one's start is hidden. Packed
// sequences, of any length, are given out one by one, unless most must be short and are many.
int64_t pieces_each(const Plan& plan, const PlanInputs& in, const ChunkGrid& grid,
                    int64_t value_blocks, int64_t places) {
  constexpr int64_t kShort = 8;   // chunks
  constexpr int64_t kRounds = 4;  // of packed ones, so that none is waited for long
  const int64_t visited = plan.segments > 0 ? grid.B * plan.segments : grid.N;
  const int64_t pieces = visited * in.H * value_blocks;
  if (in.packed) {
    const int64_t most = grid.chunks <= kShort * visited ? kMostPieces : 1;
    return std::clamp<int64_t>(pieces / (kRounds * places), 1, most);
  }
  int64_t least = 0, chosen = 1;
  for (int64_t each = 1; each <= kMostPieces; ++each) {
    const int64_t rounds = ceil_div(ceil_div(pieces, each), places) * each;
    if (each > 1 && rounds > least) continue;
    least = rounds;
    chosen = each;
  }
  return chosen;
}
int64_t cluster_pieces(const Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  return pieces_each(plan, in, grid, ceil_div(in.V, 2 * kFusedValues),
                     std::max<int64_t>(1, in.processors / 2));
}

void choose_paired_forward(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  if (!plan.linear && is_paired(in)) plan.cluster_pieces = cluster_pieces(plan, in, grid);
}

void choose_narrow_forward(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  if (is_narrow(in)) plan.block_pieces = pieces_each(plan, in, grid, 1, sweep_places(in));
}

// One pass over whole sequences in place of one for the operands and another for S.
void choose_paired_states(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  plan.paired_states = plan.swept_gradients && plan.segments == 0 &&
                       plan.kept.operands == Workspace::kAbsent && is_paired(in);
  if (plan.paired_states) plan.cluster_pieces = cluster_pieces(plan, in, grid);
}

// One pass for the operands and the own parts of segments, where backward makes gradients in a
// sweep: other gradients need sums of gates of which every bit is operands.cu's.
void choose_paired_parts(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  if (!plan.linear || plan.segment_states == 0 || in.packed || !is_paired(in)) return;
  if (in.backward && plan.kept.operands != Workspace::kAbsent) return;
  const Plan backward = backward_sweep(in, grid);
  plan.paired_parts = backward.swept_gradients && backward.segments == plan.segments;
  if (!plan.paired_parts) return;
  plan.cluster_pieces = 1;
  // In place of operands and own parts; behind it come exact gradients, in forward exact scores
  // beside the scan.
  plan.launches += in.backward ? 1 : -1;
}

// Behind paired parts linear forward makes A, which spares bytes; where a block has few chunks, or
// sums others' states, that takes longer.
void choose_scores(Plan& plan, const PlanInputs& in) {
  if (!plan.linear) return;
  if (in.backward)
    plan.scores = plan.swept_gradients || plan.paired_chunks;
  else
    plan.scores = !plan.paired_parts || plan.kept.operands != Workspace::kAbsent;
}

// Gradients by pairs of chunks, where the states of all chunks would be most of what is read: with
// fewer values what a pair takes before and behind them costs more than it spares.
void choose_paired_chunks(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  constexpr int64_t kMostUnpaired = 128;  // values
  plan.paired_chunks = plan.linear && !plan.swept_gradients && in.K > kOperandKeys &&
                       in.V > kMostUnpaired && !in.batch_invariant && grid.chunks > 1;
}

// What step 6 hands to step 7, but where gradients that are fp32 themselves take it.
void add_intra(Workspace& w, const PlanInputs& in, int64_t keys) {
  if (in.dtype != DType::kFloat) {
    w.dq_intra = add(w, keys);
    w.dk_intra = add(w, keys);
  }
  if (in.key_gated && in.gate_dtype != DType::kFloat) w.dg_intra = add(w, keys);
}

// What gates on values add, and the kernels they add.
void add_value_gates(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  const int64_t elements = grid.B * in.T * in.H * in.V, floats = elements * kFloatBytes;
  const int64_t operand = elements * bytes_of(intermediate_dtype(in.dtype));
  Workspace& w = plan.workspace;
  w.bv = add(w, floats);
  if (in.dtype == DType::kFloat) w.bv_suffix = add(w, floats);
  w.v_out = add(w, operand);
  plan.launches += 2;  // their sum, and the operands
  if (!in.backward) return;

  w.value_tiers = add(w, tier_bytes(grid, in.H));
  w.do_in = add(w, operand);
  w.o_intra = add(w, floats);
  if (in.dtype != DType::kFloat) w.dv_intra = add(w, floats);
  if (in.value_gate_dtype != DType::kFloat) w.dgv_intra = add(w, floats);
  // Scores and step 6 of the values, each in two tiers, in place of backward 4 and 5; two merges.
  plan.launches += 4;
}

void plan_steps(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  const int64_t token_heads = grid.B * in.T * in.H;
  const int64_t each = bytes_of(intermediate_dtype(in.dtype));
  const int64_t keys = token_heads * in.K * kFloatBytes;
  const int64_t map_launches = in.packed ? 2 : 0;
  Workspace& w = plan.workspace;
  if (in.key_gated) {
    w.b = add(w, keys);
    // Keeps fp32 accuracy beside resets; shorter inputs round to more than b loses there.
    if (in.dtype == DType::kFloat) w.b_suffix = add(w, keys);
  } else {
    w.no_decay = add(w, in.K * kFloatBytes);
  }
  w.A = add(w, token_heads * kChunk * each);
  w.S = add(w, plan.state_bytes);
  plan.launches = map_launches + 5 + in.key_gated;
  if (in.backward) {
    // score_grads runs after value_grads, the last to read A, but not with gates on values.
    w.dA = in.value_gated ? add(w, token_heads * kChunk * each) : w.A;
    w.dS = add(w, plan.state_bytes);
    add_intra(w, in, keys);
    plan.state_bytes *= 2;
    // Without gates on values bf16's two sweeps are one launch.
    const bool two_sweeps = in.dtype != DType::kBFloat16 || in.value_gated;
    plan.launches = map_launches + 9 + in.key_gated + two_sweeps;
  }
  if (in.value_gated) add_value_gates(plan, in, grid);
}

// Bytes of q, k, v and g of H heads each.
int64_t input_bytes(const PlanInputs& in, const ChunkGrid& grid) {
  const int64_t each = bytes_of(in.dtype);
  return grid.B * in.T * in.H * (in.K * (2 * each + bytes_of(in.gate_dtype)) + in.V * each);
}

// By the plans of both passes by themselves, which each of them so finds alike. Never more than the
// inputs have: many short packed sequences, or few values, would ask for several times as much.
Workspace plan_kept(const PlanInputs& in, const ChunkGrid& grid) {
  Workspace kept;
  if (!in.kept) return kept;
  PlanInputs pass = in;
  pass.kept = pass.backward = false;
  const Plan forward = make_plan(pass);
  pass.backward = true;
  const Plan backward = make_plan(pass);
  const bool over_operands = forward.linear && backward.linear && !backward.paired_states;
  // Other gradients need sums of gates of which every bit is operands.cu's.
  const bool on_chip = !forward.linear && backward.linear && backward.swept_gradients &&
                       (backward.segments == 0 || forward.packed_parts);
  if (!over_operands && !on_chip) return kept;
  const int64_t most = input_bytes(in, grid);
  kept.operands = add(kept, all_operand_bytes(in, grid));
  kept.tiers = add(kept, tier_bytes(grid, in.H));
  if (kept.bytes == 0 || kept.bytes > most) return {};
  const int64_t segment_heads = grid.B * forward.segment_states * in.H;
  if (segment_heads > 0 && forward.segments == backward.segments &&
      forward.segment_chunks == backward.segment_chunks) {
    Workspace more = kept;
    // Of packed sequences forward has none of the last segments, which backward wants.
    if (!forward.packed_parts) more.segment_decays = add(more, segment_heads * in.K * kFloatBytes);
    more.segment_states = add(more, segment_heads * in.K * in.V * kFloatBytes);
    if (more.bytes <= most) return more;
  }
  return kept;
}

void plan_fused_forward(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  plan.state_bytes = 0;
  choose_segments(plan, in, grid);
  choose_prefixes(plan, in, grid);
  plan.launches = (in.packed ? 2 : 0) + 2;  // the sweep, behind operands or before exact output
  add_segments(plan, in, grid);
  choose_operands(plan, in, grid);
  choose_paired_forward(plan, in, grid);
  choose_narrow_forward(plan, in, grid);
  choose_paired_parts(plan, in, grid);
  choose_scores(plan, in);
}

void plan_fused_backward(Plan& plan, const PlanInputs& in, const ChunkGrid& grid) {
  const int64_t token_heads = grid.B * in.T * in.H;
  const int64_t keys = token_heads * in.K * kFloatBytes;
  const int64_t scores = token_heads * kChunk * bytes_of(intermediate_dtype(in.dtype));
  Workspace& w = plan.workspace;
  // Operands, or what chunks outside tier 1 lack (kept operands too), states, gradients.
  plan.launches = (in.packed ? 2 : 0) + 3;
  choose_sweep(plan, in, grid);
  add_segments(plan, in, grid);
  choose_operands(plan, in, grid);
  choose_paired_states(plan, in, grid);
  choose_paired_parts(plan, in, grid);
  choose_paired_chunks(plan, in, grid);
  choose_scores(plan, in);
  // In tiles where sweeps go over operands; of pairs of chunks one each.
  const int64_t places = plan.paired_chunks && !in.packed ? ceil_div(grid.chunks, 2) : grid.chunks;
  const int64_t made =
      plan.linear ? grid.B * places * in.H * state_tile_bytes(in.K, in.V) : plan.state_bytes;
  w.S = add(w, made);
  plan.state_bytes = made;
  if (!plan.swept_gradients) {
    w.dS = add(w, made);
    plan.state_bytes += made;
  }
  // Chunks outside tier 1 alone use these. A is a part of operands.
  if (!plan.linear) w.A = add(w, scores);
  add_intra(w, in, keys);
}

}  // namespace

ChunkGrid make_grid(int64_t N, int64_t T, bool packed) {
  ChunkGrid grid;
  grid.B = packed ? 1 : N;
  grid.T = T;
  grid.N = N;
  grid.packed = packed;
  grid.chunks = packed ? T / kChunk + N : (T + kChunk - 1) / kChunk;
  grid.slots = grid.chunks + packed;
  return grid;
}

Workspace step_workspace(const ChunkGrid& grid, int64_t H, bool tiers) {
  Workspace w;
  if (grid.packed) {
    w.sequences = add(w, (grid.N + 1) * sizeof(Sequence));
    w.chunk_slots = add(w, grid.slots * sizeof(ChunkSlot));
  }
  if (tiers) w.tiers = add(w, tier_bytes(grid, H));
  return w;
}

const char* why_not_fused(const PlanInputs& in) {
  if (!in.key_gated) return "gates on keys (g)";
  if (in.value_gated) return "no gates on values (gv)";
  if (!in.sm90) return "a GPU of compute capability 9.0 and a build for 9.0a";
  if (in.dtype != DType::kBFloat16) return "q, k and v in torch.bfloat16";
  if (in.K % 8 != 0 || in.V % 8 != 0) return "K and V to be multiples of 8";
  if (!in.aligned) return "rows that start at multiples of 16 bytes";
  if (in.K > kFusedKeys) return "K to be at most 256";
  if (in.gate_dtype == DType::kHalf) return "g in torch.bfloat16 or torch.float32";
  return nullptr;
}

Plan make_plan(const PlanInputs& in) {
  const ChunkGrid grid = make_grid(in.N, in.T, in.packed);
  Plan plan;
  if (in.choice != PathChoice::kSteps && why_not_fused(in) == nullptr) {
    plan.path = Path::kFused;
    plan.kept = plan_kept(in, grid);
  }
  plan.workspace = step_workspace(grid, in.H, /*tiers=*/plan.kept.tiers == Workspace::kAbsent);
  if (plan.path == Path::kFused && in.packed) {
    plan.workspace.by_last_segment = add(plan.workspace, (grid.N + 1) * sizeof(int32_t));
    plan.workspace.totals = add(plan.workspace, sizeof(PackedTotals));
  }
  plan.state_bytes =
      grid.B * grid.chunks * in.H * in.K * in.V * bytes_of(intermediate_dtype(in.dtype));
  if (plan.path == Path::kSteps)
    plan_steps(plan, in, grid);
  else if (in.backward)
    plan_fused_backward(plan, in, grid);
  else
    plan_fused_forward(plan, in, grid);
  return plan;
}

}  // namespace gla_ext::cuda
