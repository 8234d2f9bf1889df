// chunk_gla over the tokens of several ranks (context parallel). Each rank sums up what its tokens
// add to the state. One all-gather passes these summaries to all ranks, and each computes the state
// that enters it. Backward does the same from the last rank to the first.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <vector>

#include "chunk_gla/for_backward.h"
#include "dispatch/autocast.h"
#include "dispatch/differentiable.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"

namespace gla_ext {
namespace {

using Ints = std::vector<int64_t>;

// The operator's arguments.
struct Arguments : ChunkInputs {
  const OptionalTensor &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool output_final_state, state_v_first, batch_invariant, for_backward;
  int64_t rank, size;
  std::string_view group;
  at::IntArrayRef counts, before, after, spans;
};

// The tokens that this rank has.
struct Ranks {
  int64_t rank, size;
  std::string group;
  int64_t count;          // packed: own sequences
  int64_t before, after;  // earlier ranks with its first sequence, later ranks with its last
  Ints spans;             // packed: start, end of its first sequence, start of its last, end

  int64_t last_row() const { return count - 1; }
};

// The inputs of a call, or of some of its tokens.
struct Inputs {
  at::Tensor q, k, v;
  OptionalTensor g, gv;
  std::optional<double> scale;
  bool v_first, batch_invariant;

  Inputs part(int64_t start, int64_t end) const {
    const auto of = [&](const OptionalTensor& t) {
      return given(t) ? OptionalTensor(t->slice(1, start, end)) : std::nullopt;
    };
    return {q.slice(1, start, end),
            k.slice(1, start, end),
            v.slice(1, start, end),
            of(g),
            of(gv),
            scale,
            v_first,
            batch_invariant};
  }
};

// Every rank's `own`, in the order of the ranks.
at::Tensor gather(const at::Tensor& own, const Ranks& r) {
  static const auto all_gather = c10::Dispatcher::singleton().findSchemaOrThrow(
      "_c10d_functional::all_gather_into_tensor", "");
  static const auto wait = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                               .typed<at::Tensor(const at::Tensor&)>();
  // Boxed: the group's name is a string in torch 2.11, and any value in newer ones.
  torch::jit::Stack stack{own, r.size, r.group};
  all_gather.callBoxed(stack);
  return wait.call(stack.at(0).toTensor());
}

// Sets all rows of a state to 0; for packed sequences, one row.
void clear_rows(const at::Tensor& t, bool packed, int64_t row) {
  (packed ? t.narrow(0, row, 1) : t).zero_();
}

// If sequences are rows: the initial or final state if this rank uses it, else absent.
OptionalTensor own_rows(const OptionalTensor& t, int64_t reach) {
  return reach > 0 ? std::nullopt : t;
}

// Packed: that state of the sequence that this rank passes on, if its other end is here too.
OptionalTensor own_row(const OptionalTensor& t, const Ranks& r, int64_t reach, int64_t row) {
  const bool own = r.count > 1 || (r.count == 1 && reach == 0);
  return given(t) && own ? OptionalTensor(t->narrow(0, row, 1)) : std::nullopt;
}

// Packed: the summary of this rank's last sequence, which it passes on to the ranks after it.
at::Tensor packed_summary(const Inputs& in, const OptionalTensor& initial_state, const Ranks& r) {
  const int64_t start = r.spans[2], end = r.count > 0 ? r.spans[3] : start;
  const Inputs last = in.part(start, end);
  return std::get<0>(chunk_gla_summary(last.q, last.k, last.v, last.g, last.gv,
                                       own_row(initial_state, r, r.before, r.last_row()), in.scale,
                                       in.v_first, in.batch_invariant, /*for_backward=*/false, 0));
}

// Packed: the gradient of what enters the first sequence.
at::Tensor packed_summary_bwd(const Inputs& in, const at::Tensor& d_o, const OptionalTensor& dht,
                              const Ranks& r) {
  const at::Tensor none = d_o.new_empty({0}, d_o.options().dtype(at::kByte));
  const int64_t start = r.spans[0], end = r.count > 0 ? r.spans[1] : start;
  const Inputs first = in.part(start, end);
  return std::get<0>(chunk_gla_summary_bwd(d_o.slice(1, start, end), own_row(dht, r, r.after, 0),
                                           first.q, first.k, first.v, first.g, first.gv, in.scale,
                                           in.v_first, in.batch_invariant, none, 0));
}

// The fold of all ranks' summaries, for packed sequences into `row`. decays: in backward.
std::tuple<at::Tensor, at::Tensor> fold(const Inputs& in, const at::Tensor& summaries,
                                        const OptionalTensor& decays,
                                        const OptionalTensor& boundary, const Ranks& r, bool packed,
                                        int64_t reach, int64_t row) {
  const c10::SymInt each = packed ? c10::SymInt(1) : in.q.sym_size(0);
  // If nothing enters, only decays are wanted.
  const c10::SymInt N = reach == 0 ? c10::SymInt(0) : packed ? c10::SymInt(r.count) : each;
  return chunk_gla_fold(summaries, decays, reach > 0 ? boundary : std::nullopt, r.size, each, N,
                        in.q.sym_size(2), in.q.sym_size(3), in.v.sym_size(3), given(in.g),
                        given(in.gv), in.v_first, {r.rank}, {reach}, packed ? Ints{row} : Ints());
}

// Backward while autograd records a graph of it. Its own backward raises, as it is not supported.
// Tensors that have a gradient are arguments besides `run`, so that autograd sees them.
BackwardOutputs run_backward(const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                             const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                             const OptionalTensor&, const OptionalTensor&,
                             const std::function<BackwardOutputs()>& run) {
  return run();
}
struct OfForward {
  static constexpr const char* fwd = "chunk_gla_fwd";
};

class ChunkGlaAcrossRanks : public torch::autograd::Function<ChunkGlaAcrossRanks> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const OptionalTensor& g,
                               const OptionalTensor& gv, const OptionalTensor& initial_state,
                               const Arguments& a, const Ranks& r, at::Tensor* not_asked_for) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Inputs in{q, k, v, g, gv, a.scale, a.state_v_first, a.batch_invariant};
    const bool packed = given(a.cu_seqlens);
    HalfSizes sizes;
    at::Tensor own, prepared;
    if (packed) {
      own = packed_summary(in, initial_state, r);
    } else {
      sizes = half_sizes(
          {q, k, v, g, gv, kAbsent, kAbsent, a.scale, false, false, a.batch_invariant, 0},
          a.for_backward);
      std::tie(own, prepared) =
          chunk_gla_summary(q, k, v, g, gv, own_rows(initial_state, r.before), a.scale,
                            a.state_v_first, a.batch_invariant, a.for_backward, sizes.prepared);
    }
    const auto [entered, decays] =
        fold(in, gather(own, r), kAbsent, initial_state, r, packed, r.before, 0);
    const OptionalTensor state = r.before > 0 ? OptionalTensor(entered) : initial_state;
    const bool ends = a.output_final_state && (packed || r.after == 0);
    at::Tensor o, final_state, left, entering;
    if (packed) {
      ForwardArguments whole{
          q, k, v, g, gv, state, a.cu_seqlens, a.scale, ends, a.state_v_first, a.batch_invariant,
          0};
      if (a.for_backward) whole.for_backward_bytes = for_backward_bytes(whole);
      std::tie(o, final_state, left) = dispatch(whole);
      entering = left;
    } else {
      std::tie(o, final_state, entering) =
          chunk_gla_apply(q, k, v, g, gv, state, a.scale, ends, a.state_v_first, a.batch_invariant,
                          a.for_backward, prepared, sizes.segments);
      left = sizes.left ? prepared : prepared.new_empty({0});
      if (!sizes.left) entering = entering.new_empty({0});
    }
    if (ends && r.after > 0) clear_rows(final_state, packed, r.last_row());
    if (a.output_final_state && !ends) final_state = no_state(in, decays);
    save(ctx, {q, k, v, g, gv, state, a.cu_seqlens, left, entering, decays});
    auto& saved = ctx->saved_data;
    saved["scale"] = a.scale;
    saved["output_final_state"] = a.output_final_state;
    saved["state_v_first"] = a.state_v_first;
    saved["batch_invariant"] = a.batch_invariant;
    saved["has_initial_state"] = given(initial_state);
    saved["prepared_bwd"] = sizes.prepared_bwd;
    saved["rank"] = r.rank, saved["size"] = r.size, saved["group"] = r.group;
    saved["count"] = r.count, saved["before"] = r.before, saved["after"] = r.after;
    saved["spans"] = r.spans;
    ctx->set_materialize_grads(false);
    // As in Differentiable, results without a gradient go around the Function.
    *not_asked_for = final_state;
    if (a.output_final_state) return {o, final_state};
    return {o};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    OptionalTensor dht;
    if (ctx->saved_data["output_final_state"].toBool()) dht = or_absent(grads[1]);
    const auto run = [&] { return gradients(ctx, saved, d_o, dht); };
    auto [dq, dk, dv, dg, dgv, dh0] = at::GradMode::is_enabled()
                                          ? DifferentiableOnce<run_backward, OfForward>::record(
                                                d_o, dht, q, k, v, or_absent(saved[3]),
                                                or_absent(saved[4]), or_absent(saved[5]), run)
                                          : run();
    if (!ctx->saved_data["has_initial_state"].toBool()) dh0 = at::Tensor();
    variable_list found{dq, dk, dv, grad_of(saved[3], dg), grad_of(saved[4], dgv), dh0};
    found.resize(9);  // one per argument
    return found;
  }

 private:
  // dq, dk, dv, dg, dgv and dh0; 0 elements if there is no such input.
  static BackwardOutputs gradients(AutogradContext* ctx, const variable_list& saved,
                                   const at::Tensor& d_o, OptionalTensor dht) {
    auto& data = ctx->saved_data;
    const Ranks r{data["rank"].toInt(),       data["size"].toInt(),   data["group"].toStringRef(),
                  data["count"].toInt(),      data["before"].toInt(), data["after"].toInt(),
                  data["spans"].toIntVector()};
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &left = saved[7],
                     &entering = saved[8], &decays = saved[9];
    const OptionalTensor g = or_absent(saved[3]), gv = or_absent(saved[4]),
                         state = or_absent(saved[5]), cu_seqlens = or_absent(saved[6]);
    const bool packed = given(cu_seqlens), v_first = data["state_v_first"].toBool();
    const bool batch_invariant = data["batch_invariant"].toBool();
    const std::optional<double> scale = data["scale"].toOptional<double>();
    const Inputs in{q, k, v, g, gv, scale, v_first, batch_invariant};
    at::Tensor own, prepared_bwd;
    if (packed) {
      own = packed_summary_bwd(in, d_o, dht, r);
    } else {
      dht = own_rows(dht, r.after);
      std::tie(own, prepared_bwd) =
          chunk_gla_summary_bwd(d_o, dht, q, k, v, g, gv, scale, v_first, batch_invariant, left,
                                data["prepared_bwd"].toInt());
    }
    const at::Tensor summaries = gather(own.flatten(), r);
    if (r.after > 0)
      dht = std::get<0>(fold(in, summaries, decays, dht, r, packed, r.after, r.last_row()));
    auto [dq, dk, dv, dg, dgv, dh0] =
        packed ? chunk_gla_bwd(d_o, dht, q, k, v, g, gv, state, cu_seqlens, scale, v_first,
                               batch_invariant, left)
               : chunk_gla_apply_bwd(d_o, dht, q, k, v, g, gv, state, scale, v_first,
                                     batch_invariant, left, entering, prepared_bwd);
    if (data["has_initial_state"].toBool() && r.before > 0) clear_rows(dh0, packed, 0);
    return {dq, dk, dv, dg, dgv, dh0};
  }

  // The final state if every row continues on another rank.
  static at::Tensor no_state(const Inputs& in, const at::Tensor& like) {
    const c10::SymInt B = in.q.sym_size(0), H = in.q.sym_size(2), K = in.q.sym_size(3),
                      V = in.v.sym_size(3);
    return at::zeros_symint({B, H, in.v_first ? V : K, in.v_first ? K : V}, like.options());
  }
};

void check_ranks(const Arguments& a, bool packed) {
  const char* op = "chunk_gla_across_ranks";
  TORCH_CHECK_VALUE(a.rank >= 0 && a.rank < a.size, op, ": expected rank to be from 0 to ",
                    a.size - 1, ", got ", a.rank);
  const auto check = [&](const char* name, at::IntArrayRef values, size_t elements) {
    TORCH_CHECK_VALUE(values.size() == elements, op, ": expected ", name, " to have ", elements,
                      elements == 1 ? " element, got " : " elements, got ", values.size());
  };
  check("before", a.before, 1);
  check("after", a.after, 1);
  if (!packed) return;
  check("counts", a.counts, 1);
  check("spans", a.spans, 4);
}

TwoTensors chunk_gla_across_ranks(const Arguments& a) {
  refuse_unsupported("chunk_gla_fwd", a.q, a.k, a.v, a.g, a.gv, a.initial_state);
  const bool packed = given(a.cu_seqlens);
  check_ranks(a, packed);
  const Ranks r{a.rank,      a.size,     std::string(a.group), packed ? a.counts[0] : 0,
                a.before[0], a.after[0], a.spans.vec()};
  at::Tensor final_state;
  auto outputs =
      ChunkGlaAcrossRanks::apply(a.q, a.k, a.v, a.g, a.gv, a.initial_state, a, r, &final_state);
  return {outputs[0], a.output_final_state ? outputs[1] : final_state};
}

// The operator, through the dispatcher.
TwoTensors call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const OptionalTensor& g, const OptionalTensor& gv,
                const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                std::optional<double> scale, bool output_final_state, bool state_v_first,
                bool batch_invariant, bool for_backward, int64_t rank, int64_t size,
                std::string_view group, at::IntArrayRef counts, at::IntArrayRef before,
                at::IntArrayRef after, at::IntArrayRef spans) {
  static const Op<decltype(call)> op("gla_ext::chunk_gla_across_ranks");
  return op(q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state, state_v_first,
            batch_invariant, for_backward, rank, size, group, counts, before, after, spans);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define_schema(
      m,
      "chunk_gla_across_ranks(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? "
      "initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, bool "
      "state_v_first, bool batch_invariant, bool for_backward, int rank, int size, str group, "
      "int[] counts, int[] before, int[] after, int[] spans) -> (Tensor o, Tensor final_state)");
  autocast_first<3, call>(m, "chunk_gla_across_ranks");
}

TORCH_LIBRARY_IMPL(gla_ext, CompositeImplicitAutograd, m) {
  m.impl("chunk_gla_across_ranks", by_arguments<call, chunk_gla_across_ranks>);
}

}  // namespace gla_ext
