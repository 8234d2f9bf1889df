// chunk_gla on a pool of states, which it reads and writes in place.
#include "op.h"

#include "dispatch/autocast.h"
#include "dispatch/checker.h"
#include "dispatch/in_place.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/output.h"
#include "dispatch/schema.h"

namespace gla_ext {

at::Tensor chunk_gla_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const OptionalTensor& g, const OptionalTensor& gv, at::Tensor& state,
                      const OptionalTensor& slots, const OptionalTensor& write_slots,
                      const OptionalTensor& has_initial_state, const OptionalTensor& cu_seqlens,
                      std::optional<double> scale, bool state_v_first, bool batch_invariant,
                      int64_t checkpoint_every, const OptionalTensor& checkpoints,
                      const OptionalTensor& checkpoint_slots,
                      const OptionalTensor& checkpoint_cu_starts) {
  static const Op<decltype(chunk_gla_)> op("gla_ext::chunk_gla_");
  return op(q, k, v, g, gv, state, slots, write_slots, has_initial_state, cu_seqlens, scale,
            state_v_first, batch_invariant, checkpoint_every, checkpoints, checkpoint_slots,
            checkpoint_cu_starts);
}

void chunk_gla_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const OptionalTensor& g, const OptionalTensor& gv, at::Tensor& state,
                   const OptionalTensor& slots, const OptionalTensor& write_slots,
                   const OptionalTensor& has_initial_state, const OptionalTensor& cu_seqlens,
                   std::optional<double> scale, bool state_v_first, bool batch_invariant,
                   int64_t checkpoint_every, const OptionalTensor& checkpoints,
                   const OptionalTensor& checkpoint_slots,
                   const OptionalTensor& checkpoint_cu_starts, at::Tensor& out) {
  static const Op<decltype(chunk_gla_out)> op("gla_ext::chunk_gla_", "out");
  op(q, k, v, g, gv, state, slots, write_slots, has_initial_state, cu_seqlens, scale, state_v_first,
     batch_invariant, checkpoint_every, checkpoints, checkpoint_slots, checkpoint_cu_starts, out);
}

// Checks of the operator's arguments.
namespace {

constexpr const char* kOp = "chunk_gla_";

void check_checkpoints(const Checker& check, const PoolArguments& a, const Shape& shape) {
  const std::initializer_list<std::pair<const char*, const OptionalTensor&>> beside{
      {"checkpoints", a.checkpoints},
      {"checkpoint_slots", a.checkpoint_slots},
      {"checkpoint_cu_starts", a.checkpoint_cu_starts}};
  TORCH_CHECK_VALUE(a.checkpoint_every >= 0 && a.checkpoint_every % kChunk == 0 &&
                        a.checkpoint_every <= kMostCheckpointTokens,
                    kOp, ": expected checkpoint_every to be a multiple of ", kChunk,
                    " tokens, at most ", kMostCheckpointTokens, ", got ", a.checkpoint_every);
  if (a.checkpoint_every == 0) {
    for (const auto& [name, t] : beside)
      TORCH_CHECK_VALUE(!given(t), kOp, ": expected checkpoint_every beside ", name, ", got none");
    return;
  }
  TORCH_CHECK_VALUE(given(a.checkpoint_slots) || given(a.checkpoints), kOp,
                    ": expected checkpoint_slots, rows of the pool, or a tensor of checkpoints "
                    "beside checkpoint_every, got neither");
  TORCH_CHECK_VALUE(given(a.checkpoint_cu_starts) || !shape.packed, kOp,
                    ": expected checkpoint_cu_starts beside checkpoint_every and cu_seqlens, got "
                    "None");
  if (given(a.checkpoints)) {
    const at::Tensor& t = *a.checkpoints;
    const char* dims = a.state_v_first ? "[Q, H, V, K]" : "[Q, H, K, V]";
    check.rank("checkpoints", t, 4, dims);
    check.pool("checkpoints", t, shape, t.sym_size(0), dims, a.state_v_first);
  }
  if (given(a.checkpoint_slots)) {
    check.indices("checkpoint_slots", *a.checkpoint_slots, "[total]");
    if (!given(a.checkpoint_cu_starts))
      check.shape("checkpoint_slots", *a.checkpoint_slots, "[N * (T // checkpoint_every)]",
                  {shape.N * (shape.T / a.checkpoint_every)});
  }
  check.indices_of("checkpoint_cu_starts", a.checkpoint_cu_starts, "[N + 1]", shape.N + 1);
}

}  // namespace

Shape check_chunk_gla_on_pool(const PoolArguments& a) {
  const Shape shape = check_chunk_gla_fwd(
      {a, kAbsent, a.cu_seqlens, a.scale, false, a.state_v_first, a.batch_invariant, 0}, kOp);
  const Checker check(kOp, "q", a.q);
  check.defined("state", a.state);
  const char* dims = a.state_v_first ? "[P, H, V, K]" : "[P, H, K, V]";
  check.rank("state", a.state, 4, dims);
  const bool by_slots = given(a.slots);  // else sequence n has row n
  check.pool("state", a.state, shape, by_slots ? a.state.sym_size(0) : shape.N, dims,
             a.state_v_first);
  check.indices_of("slots", a.slots, "[N]", shape.N);
  check.indices_of("write_slots", a.write_slots, "[N]", shape.N);
  check.has_initial_state(a.has_initial_state, "[N]", shape.N);
  check_checkpoints(check, a, shape);
  if (a.out != nullptr)
    check_out(check, *a.out, shape.dtype, "[B, T, H, V]", {shape.B, shape.T, shape.H, shape.V});
  return shape;
}

void check_pool_layouts(const PoolArguments& a) {
  check_pool_layout(kOp, a.state, /*written=*/true);
  if (given(a.checkpoints)) check_pool_layout(kOp, *a.checkpoints, /*written=*/true, "checkpoints");
  if (a.out != nullptr)
    check_out_layout(kOp, *a.out,
                     {{"q", &a.q},
                      {"k", &a.k},
                      {"v", &a.v},
                      {"g", where_given(a.g)},
                      {"gv", where_given(a.gv)},
                      {"state", &a.state},
                      {"checkpoints", where_given(a.checkpoints)}});
}

namespace {

// The result while a graph is traced.
at::Tensor chunk_gla_on_pool_meta(const PoolArguments& a) {
  const Shape s = check_chunk_gla_on_pool(a);
  return a.out != nullptr ? *a.out : fresh_output(s, a.v);
}

constexpr Refusal kChunks{"chunk_gla_",
                          "a pool of states has no gradient, call gla_ext.chunk_gla, or run it "
                          "under torch.no_grad()"};

constexpr size_t kCheckpoints = 14;  // among the arguments, and written to

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define_with_out(
      m, "chunk_gla_",
      "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor(a!) state, Tensor? slots, "
      "Tensor? write_slots, Tensor? has_initial_state, Tensor? cu_seqlens, float? scale, bool "
      "state_v_first, bool batch_invariant, int checkpoint_every=0, Tensor(b!)? checkpoints=None, "
      "Tensor? checkpoint_slots=None, Tensor? checkpoint_cu_starts=None",
      'c');
  autocast_first<3, chunk_gla_>(m, "chunk_gla_");
  autocast_first<3, chunk_gla_out>(m, "chunk_gla_.out");
  in_place<chunk_gla_, kChunks, kCheckpoints>(m, "chunk_gla_");
  in_place<chunk_gla_out, kChunks, kCheckpoints>(m, "chunk_gla_.out");
  refuse_vmap(m, {"chunk_gla_", "chunk_gla_.out"});
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) { register_on_pool<chunk_gla_on_pool_meta>(m); }

}  // namespace gla_ext
