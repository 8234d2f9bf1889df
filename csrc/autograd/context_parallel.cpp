// chunk_gla over the tokens of several ranks: each sums up what its own add to the state, one
// all-gather hands that to all, and what enters a rank follows (context parallel). Backward goes
// the same way from the last rank to the first.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "checks/chunk_gla.h"
#include "for_backward.h"
#include "halves.h"
#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Ints = std::vector<int64_t>;

// Which tokens of the text this rank has, in `parts`: one, or two in the zigzag layout. Each is
// number position(p) of the text's parts in order.
struct Ranks {
  int64_t rank, size;
  std::string group;
  Ints counts;         // own sequences of each part; rows without offsets
  Ints before, after;  // parts before, and after, that its first, and its last, sequence goes on in
  Ints spans;  // packed: of each part start, end of its first sequence, start of its last, end

  int64_t parts() const { return static_cast<int64_t>(counts.size()); }
  int64_t position(int64_t part) const { return part == 0 ? rank : 2 * size - 1 - rank; }
  int64_t span(int64_t part, int64_t i) const { return spans[4 * part + i]; }
  // Row of its first, and its last, sequence among the rank's own.
  int64_t first_row(int64_t part) const {
    int64_t row = 0;
    for (int64_t i = 0; i < part; ++i) row += counts[i];
    return row;
  }
  int64_t last_row(int64_t part) const { return first_row(part) + counts[part] - 1; }
};

struct Inputs {
  const at::Tensor &q, &k, &v;
  OptionalTensor g, gv;
  std::optional<double> scale;
  bool batch_invariant;

  OptionalTensor cut(const OptionalTensor& t, int64_t start, int64_t end) const {
    return given(t) ? OptionalTensor(t->slice(1, start, end)) : std::nullopt;
  }
};

// Of all parts of the text in order, [parts, X].
at::Tensor gather(const at::Tensor& own, const Ranks& r) {
  static const auto all_gather =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("_c10d_functional::all_gather_into_tensor", "")
          .typed<at::Tensor(const at::Tensor&, int64_t, std::string)>();
  static const auto wait = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                               .typed<at::Tensor(const at::Tensor&)>();
  const at::Tensor all = wait.call(all_gather.call(own.contiguous(), r.size, r.group));
  if (r.parts() == 1) return all;
  // Ranks' parts are rank and 2 size - 1 - rank.
  const at::Tensor pairs = all.unflatten(0, {r.size, 2});
  return at::cat({pairs.select(1, 0), pairs.select(1, 1).flip({0})});
}

// exp(decay) x by rows, and by columns where there are gates on values; exactly 0 at a reset, where
// x may be infinite.
at::Tensor decayed(const at::Tensor& x, const at::Tensor& decay, const at::Tensor& value_decay) {
  at::Tensor y = x;
  const auto by = [&](const at::Tensor& d) {
    const at::Tensor factor = at::exp(d);
    y = at::where(at::eq(factor, 0), at::zeros_like(y), at::mul(y, factor));
  };
  if (decay.numel() > 0) by(decay.unsqueeze(-1));
  if (value_decay.numel() > 0) by(value_decay.unsqueeze(-2));
  return y;
}

// A state in the layout [.., K, V] and back.
at::Tensor turned(const at::Tensor& state, bool v_first) {
  return v_first ? state.transpose(-1, -2) : state;
}

// What a part hands on: state, decay, value_decay of its last sequence, or of its rows [R, ...].
struct Summary {
  at::Tensor state, decay, value_decay;

  at::Tensor flat() const {
    return at::cat({state.reshape({-1}), decay.reshape({-1}), value_decay.reshape({-1})});
  }
};

// Those of all parts of the text, from what `gather` gives.
struct Summaries {
  at::Tensor states, decays, value_decays;  // [parts, R, H, ...]

  Summaries(const at::Tensor& all, const Summary& like) {
    const int64_t parts = all.size(0), S = like.state.numel(), D = like.decay.numel();
    const auto part = [&](const at::Tensor& t, int64_t start) {
      Ints sizes{parts};
      sizes.insert(sizes.end(), t.sizes().begin(), t.sizes().end());
      return all.slice(1, start, start + t.numel()).reshape(sizes);
    };
    states = part(like.state, 0);
    decays = part(like.decay, S);
    value_decays =
        like.value_decay.numel() > 0 ? part(like.value_decay, S + D) : all.new_empty({parts, 0});
  }
};

class ChunkGlaAcrossRanks : public torch::autograd::Function<ChunkGlaAcrossRanks> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const OptionalTensor& g,
                               const OptionalTensor& gv, const OptionalTensor& initial_state,
                               const OptionalTensor& cu_seqlens, std::optional<double> scale,
                               bool state_v_first, bool batch_invariant, bool for_backward,
                               const Ranks& r) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Inputs in{q, k, v, g, gv, scale, batch_invariant};
    const bool packed = given(cu_seqlens);
    const OptionalTensor none;
    const ForwardArguments a{
        q, k, v, g, gv, none, cu_seqlens, scale, true, state_v_first, batch_invariant, 0};
    const HalfSizes sizes = packed ? HalfSizes{} : half_sizes(a, for_backward);
    at::Tensor prepared = q.new_empty({0}, q.options().dtype(at::kByte)), entering;
    std::vector<Summary> own;
    if (packed) {
      for (int64_t p = 0; p < r.parts(); ++p)
        own.push_back(summary_of(in, r, p, r.span(p, 2), r.span(p, 3)));
    } else {
      auto [state, decay, value_decay, left] =
          chunk_gla_summary(q, k, v, g, gv, scale, batch_invariant, for_backward, sizes.prepared);
      prepared = left;
      for (int64_t p = 0; p < r.parts(); ++p)
        own.push_back({rows_of(state, r, p), rows_of(decay, r, p), rows_of(value_decay, r, p)});
    }
    // What begins here has its initial state in what it leaves.
    const at::Tensor h0 =
        given(initial_state) ? turned(*initial_state, state_v_first) : at::Tensor();
    for (int64_t p = 0; p < r.parts(); ++p) {
      const bool begins = r.counts[p] > 0 && (r.before[p] == 0 || (packed && r.counts[p] > 1));
      if (!h0.defined() || !begins) continue;
      const at::Tensor row = packed ? h0.narrow(0, r.last_row(p), 1) : rows_of(h0, r, p);
      own[p].state = own[p].state + decayed(row, own[p].decay, own[p].value_decay);
    }
    variable_list flat;
    for (const Summary& s : own) flat.push_back(s.flat());
    const Summaries all(gather(at::stack(flat), r), own[0]);

    at::Tensor enters = h0;
    for (int64_t p = 0; p < r.parts(); ++p) {
      if (r.before[p] == 0) continue;
      at::Tensor x = at::zeros_like(own[p].state);
      for (int64_t i = r.position(p) - r.before[p]; i < r.position(p); ++i)
        x = decayed(x, all.decays[i], all.value_decays[i]) + all.states[i];
      enters = with_rows(enters, x, r, p, r.first_row(p), packed, q, v);
    }
    OptionalTensor state;
    if (enters.defined()) state = turned(enters, state_v_first).contiguous();
    at::Tensor o, final_state, left;
    if (packed) {
      ForwardArguments whole{
          q, k, v, g, gv, state, cu_seqlens, scale, true, state_v_first, batch_invariant, 0};
      if (for_backward) whole.for_backward_bytes = for_backward_bytes(whole);
      std::tie(o, final_state, left) = dispatch(whole);
      entering = q.new_empty({0}, final_state.options());
    } else {
      std::tie(o, final_state, entering) =
          chunk_gla_apply(q, k, v, g, gv, state, scale, true, state_v_first, batch_invariant,
                          for_backward, prepared, sizes.segments);
      left = sizes.left ? prepared : prepared.new_empty({0});
      if (!sizes.left) entering = entering.new_empty({0});
    }
    for (int64_t p = 0; p < r.parts(); ++p)
      if (r.after[p] > 0) {
        const at::Tensor rows =
            packed ? final_state.narrow(0, r.last_row(p), 1) : rows_of(final_state, r, p);
        const_cast<at::Tensor&>(rows).zero_();
      }
    ctx->save_for_backward({q, k, v, or_undefined(g), or_undefined(gv), or_undefined(state),
                            or_undefined(cu_seqlens), left, entering, all.decays,
                            all.value_decays});
    auto& saved = ctx->saved_data;
    saved["scale"] = scale;
    saved["state_v_first"] = state_v_first;
    saved["batch_invariant"] = batch_invariant;
    saved["has_initial_state"] = given(initial_state);
    saved["prepared_bwd"] = sizes.prepared_bwd;
    saved["rank"] = r.rank, saved["size"] = r.size, saved["group"] = r.group;
    saved["counts"] = r.counts, saved["before"] = r.before, saved["after"] = r.after;
    saved["spans"] = r.spans;
    ctx->set_materialize_grads(false);
    return {o, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const Ranks r{data["rank"].toInt(),         data["size"].toInt(),
                  data["group"].toStringRef(),  data["counts"].toIntVector(),
                  data["before"].toIntVector(), data["after"].toIntVector(),
                  data["spans"].toIntVector()};
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &left = saved[7],
                     &entering = saved[8], &decays = saved[9], &value_decays = saved[10];
    const OptionalTensor g = or_absent(saved[3]), gv = or_absent(saved[4]),
                         state = or_absent(saved[5]), cu_seqlens = or_absent(saved[6]);
    const bool packed = given(cu_seqlens), v_first = data["state_v_first"].toBool();
    const bool batch_invariant = data["batch_invariant"].toBool();
    const std::optional<double> scale = data["scale"].toOptional<double>();
    const Inputs in{q, k, v, g, gv, scale, batch_invariant};
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    at::Tensor dht = grads[1].defined() ? turned(grads[1], v_first) : at::Tensor();

    const int64_t prepared_bytes = data["prepared_bwd"].toInt();
    at::Tensor prepared_bwd = left.new_empty({0}, left.options().dtype(at::kByte));
    std::vector<at::Tensor> own;
    if (packed) {
      for (int64_t p = 0; p < r.parts(); ++p)
        own.push_back(summary_grad_of(in, d_o, r, p, r.span(p, 0), r.span(p, 1)));
    } else {
      at::Tensor state_grad;
      std::tie(state_grad, prepared_bwd) =
          chunk_gla_summary_bwd(d_o, q, k, v, g, gv, scale, batch_invariant, left, prepared_bytes);
      for (int64_t p = 0; p < r.parts(); ++p) own.push_back(rows_of(state_grad, r, p));
    }
    // What ends here has the gradient of its final state in what it hands back.
    for (int64_t p = 0; p < r.parts(); ++p) {
      const bool ends = r.counts[p] > 0 && (r.after[p] == 0 || (packed && r.counts[p] > 1));
      if (!dht.defined() || !ends || r.before[p] == 0) continue;
      if (packed) {
        const Summary s = decays_of(in, r.span(p, 0), r.span(p, 1));
        own[p] = own[p] + decayed(dht.narrow(0, r.first_row(p), 1), s.decay, s.value_decay);
      } else {
        own[p] = own[p] +
                 decayed(rows_of(dht, r, p), decays[r.position(p)], value_decays[r.position(p)]);
      }
    }
    variable_list flat;
    for (const at::Tensor& t : own) flat.push_back(t.reshape({-1}));
    const at::Tensor all = gather(at::stack(flat), r);
    for (int64_t p = 0; p < r.parts(); ++p) {
      if (r.after[p] == 0) continue;
      at::Tensor x = at::zeros_like(own[p]);
      for (int64_t i = r.position(p) + r.after[p]; i > r.position(p); --i)
        x = decayed(x, decays[i], value_decays[i]) + all[i].reshape(own[p].sizes());
      dht = with_rows(dht, x, r, p, r.last_row(p), packed, q, v);
    }
    OptionalTensor last;
    if (dht.defined()) last = turned(dht, v_first).contiguous();
    auto [dq, dk, dv, dg, dgv, dh0] =
        packed ? chunk_gla_bwd(d_o, last, q, k, v, g, gv, state, cu_seqlens, scale, v_first,
                               batch_invariant, left)
               : chunk_gla_apply_bwd(d_o, last, q, k, v, g, gv, state, scale, v_first,
                                     batch_invariant, left, entering, prepared_bwd);
    const at::Tensor none;
    if (data["has_initial_state"].toBool()) {
      for (int64_t p = 0; p < r.parts(); ++p)
        if (r.before[p] > 0) {
          at::Tensor rows = packed ? dh0.narrow(0, r.first_row(p), 1) : rows_of(dh0, r, p);
          rows.zero_();
        }
    }
    variable_list result(12);
    result[0] = dq, result[1] = dk, result[2] = dv;
    if (given(g)) result[3] = dg;
    if (given(gv)) result[4] = dgv;
    if (data["has_initial_state"].toBool()) result[5] = dh0;
    return result;
  }

 private:
  // Rows p, p + P, ... of a batch, a part's own.
  static at::Tensor rows_of(const at::Tensor& t, const Ranks& r, int64_t part) {
    if (t.dim() == 1 || r.parts() == 1) return t;
    return t.unflatten(0, {-1, r.parts()}).select(1, part);
  }
  // `state`, zero if it is not there, with other rows: number `row`, or a part's.
  static at::Tensor with_rows(const at::Tensor& state, const at::Tensor& x, const Ranks& r,
                              int64_t part, int64_t row, bool packed, const at::Tensor& q,
                              const at::Tensor& v) {
    int64_t rows = 0;
    for (const int64_t count : r.counts) rows += count;
    at::Tensor y = state.defined()
                       ? state.clone(at::MemoryFormat::Contiguous)
                       : at::zeros({rows, q.size(2), q.size(3), v.size(3)}, x.options());
    at::Tensor place = packed ? y.narrow(0, row, 1) : rows_of(y, r, part);
    place.copy_(x);
    return y;
  }
  static Summary decays_of(const Inputs& in, int64_t start, int64_t end) {
    const OptionalTensor none;
    const Shape shape = check_chunk_gla_fwd(
        {in.q, in.k, in.v, in.g, in.gv, none, none, std::nullopt, false, false, false, 0});
    return {at::Tensor(), halves::sum_of_gates(in.cut(in.g, start, end), in.q, shape),
            halves::sum_of_gates(in.cut(in.gv, start, end), in.q, shape)};
  }
  static Summary summary_of(const Inputs& in, const Ranks& r, int64_t part, int64_t start,
                            int64_t end) {
    if (r.counts[part] == 0) end = start;
    auto [state, decay, value_decay, left] =
        chunk_gla_summary(in.q.slice(1, start, end), in.k.slice(1, start, end),
                          in.v.slice(1, start, end), in.cut(in.g, start, end),
                          in.cut(in.gv, start, end), in.scale, in.batch_invariant, false, 0);
    return {state, decay, value_decay};
  }
  static at::Tensor summary_grad_of(const Inputs& in, const at::Tensor& d_o, const Ranks& r,
                                    int64_t part, int64_t start, int64_t end) {
    if (r.counts[part] == 0) end = start;
    const at::Tensor none = d_o.new_empty({0}, d_o.options().dtype(at::kByte));
    return std::get<0>(chunk_gla_summary_bwd(d_o.slice(1, start, end), in.q.slice(1, start, end),
                                             in.k.slice(1, start, end), in.v.slice(1, start, end),
                                             in.cut(in.g, start, end), in.cut(in.gv, start, end),
                                             in.scale, in.batch_invariant, none, 0));
  }
};

std::tuple<at::Tensor, at::Tensor> chunk_gla_across_ranks(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
    const OptionalTensor& gv, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
    std::optional<double> scale, bool state_v_first, bool batch_invariant, bool for_backward,
    int64_t rank, int64_t size, std::string_view group, at::IntArrayRef counts,
    at::IntArrayRef before, at::IntArrayRef after, at::IntArrayRef spans) {
  refuse_unsupported("chunk_gla", {{"q", q}, {"k", k}, {"v", v}}, {g, gv, initial_state});
  const Ranks r{rank,         size,        std::string(group), counts.vec(),
                before.vec(), after.vec(), spans.vec()};
  auto outputs = ChunkGlaAcrossRanks::apply(q, k, v, g, gv, initial_state, cu_seqlens, scale,
                                            state_v_first, batch_invariant, for_backward, r);
  return {outputs[0], outputs[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("chunk_gla_across_ranks", &chunk_gla_across_ranks);
}

}  // namespace gla_ext
