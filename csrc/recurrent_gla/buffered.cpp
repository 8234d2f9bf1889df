// recurrent_gla_buffered_step_: its checks, its registration and its CPU backend.
#include "buffered.h"

#include <ATen/ops/zeros.h>

#include "common/heads.h"
#include "cpu/host/call.h"
#include "cpu/host/pool_rows.h"
#include "cpu_kernels.h"
#include "dispatch/autocast.h"
#include "dispatch/in_place.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/output.h"
#include "dispatch/schema.h"
#include "op.h"

namespace gla_ext {
namespace {

constexpr const char* kName = "recurrent_gla_buffered_step_";

}  // namespace

at::Tensor recurrent_gla_buffered_step_(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const OptionalTensor& gk,
                                        at::Tensor& state, const OptionalTensor& slots,
                                        at::Tensor& buffer_k, at::Tensor& buffer_v,
                                        at::Tensor& buffer_g, const at::Tensor& count,
                                        std::optional<double> scale, bool state_v_first) {
  static const Op<decltype(recurrent_gla_buffered_step_)> op(
      "gla_ext::recurrent_gla_buffered_step_");
  return op(q, k, v, gk, state, slots, buffer_k, buffer_v, buffer_g, count, scale, state_v_first);
}

Shape check_buffered_step(const BufferedStep& a) {
  const Shape shape =
      check_pool({kName, &a.q, &a.k, &a.v, &a.gk, &kAbsent}, {a.state, a.slots, a.state_v_first});
  const Checker check(kName, "q", a.q);
  check.like("buffer_k", a.buffer_k);
  check.like("buffer_v", a.buffer_v);
  check.placed("buffer_g", a.buffer_g);
  if (given(a.gk))
    check.dtype("buffer_g", a.buffer_g, a.gk->scalar_type(), " like gk");
  else
    check.gate_dtype("buffer_g", a.buffer_g, shape.accumulate == at::kDouble);
  check.rank("buffer_k", a.buffer_k, 4, "[P, L, HK, K]");
  const c10::SymInt P = a.state.sym_size(0), L = a.buffer_k.sym_size(1), HK = a.k.sym_size(2);
  check.shapes({{"buffer_k", &a.buffer_k}, {"buffer_g", &a.buffer_g}}, "[P, L, HK, K]",
               {P, L, HK, shape.K});
  check.shape("buffer_v", a.buffer_v, "[P, L, HK, V]", {P, L, HK, shape.V});
  check.indices("count", a.count, "[P]");
  check.shape("count", a.count, "[P]", {P});
  TORCH_CHECK_VALUE(holds(shape.T.sym_ge(1).sym_and(shape.T.sym_le(L))), kName,
                    ": expected T to be from 1 to L = ", L, ", the tokens of a buffer, got ",
                    shape.T);
  return shape;
}

void check_buffer_layouts(const BufferedStep& a) {
  check_pool_layout(kName, a.state, /*written=*/true);
  check_pool_layout(kName, a.buffer_k, /*written=*/true, "buffer_k");
  check_pool_layout(kName, a.buffer_v, /*written=*/true, "buffer_v");
  check_pool_layout(kName, a.buffer_g, /*written=*/true, "buffer_g");
}

namespace cpu {
namespace {

// Where the new tokens of each row go in the buffer of its slot. Full buffers are folded into the
// state first.
std::vector<int64_t> make_room(const BufferedStep& a, const std::vector<int64_t>& slots) {
  const int64_t T = a.q.size(1), L = a.buffer_k.size(1), P = a.state.size(0);
  const std::vector<int64_t> count = values_of(a.count, P);
  std::vector<int64_t> first(slots.size());
  at::Tensor folded;  // [P], tokens
  for (size_t b = 0; b < slots.size(); ++b) {
    if (slots[b] < 0) continue;
    first[b] = std::clamp<int64_t>(count[slots[b]], 0, L);
    if (first[b] + T <= L) continue;
    if (!folded.defined()) folded = at::zeros({P}, a.count.options().dtype(at::kLong));
    folded.mutable_data_ptr<int64_t>()[slots[b]] = first[b];
    first[b] = 0;
  }
  if (folded.defined())
    recurrent_gla_commit_(a.buffer_k, a.buffer_v, a.buffer_g, {}, a.state, {}, folded,
                          a.state_v_first);
  return first;
}

at::Tensor buffered_step(const BufferedStep& a) {
  const Shape shape = check_buffered_step(a);
  check_buffer_layouts(a);
  return with_call(kName, shape, {}, a.scale, [&](auto& call) {
    auto& p = call.problem;
    using P = ProblemOf<decltype(call)>;
    using T = typename P::Accumulate;
    p.state_v_first = a.state_v_first;
    call.inputs({{&P::q, a.q}, {&P::k, a.buffer_k}, {&P::v, a.buffer_v}, {&P::g, a.buffer_g}});
    at::Tensor o = call.output(&P::o, p.V, a.v, a.v.scalar_type());
    const int64_t tokens = call.tokens;
    const std::vector<int64_t> slots = PoolRows(a.state, call.B, a.slots, {}, {}).slots;
    const std::vector<int64_t> first = make_room(a, slots);
    const OptionalTensor gk = over_channels(a.gk, p.K);
    std::vector<BufferedRun<T>> runs;
    int64_t longest = 0;
    for (int64_t b = 0; b < call.B; ++b) {
      if (slots[b] < 0) {
        o.select(0, b).zero_();
        continue;
      }
      const auto of_row = [&](const at::Tensor& buffer) {
        return buffer.select(0, slots[b]).narrow(0, first[b], tokens);
      };
      of_row(a.buffer_k).copy_(a.k.select(0, b));
      of_row(a.buffer_v).copy_(a.v.select(0, b));
      given(gk) ? of_row(a.buffer_g).copy_(gk->select(0, b)) : of_row(a.buffer_g).zero_();
      longest = std::max(longest, first[b] + tokens);
      for (int64_t head = 0; head < p.H; ++head) {
        const auto* matrix =
            static_cast<const char*>(a.state.const_data_ptr()) +
            (slots[b] * a.state.stride(0) + head * a.state.stride(1)) * a.state.element_size();
        Run<T> buffer{slots[b], 0, first[b] + tokens, head, matrix};
        buffer.state_dtype = dtype_of(a.state.scalar_type());
        runs.push_back({{b, 0, tokens, head}, buffer});
      }
    }
    const auto& kernels = KernelTables<RecurrentKernels<T>>::in_use();
    for_each_task<T>(static_cast<int64_t>(runs.size()),
                     kernels.buffered_workspace(p.K, p.V, tokens, longest),
                     [&](T* workspace, int64_t i) { kernels.buffered(p, workspace, runs[i]); });
    return o;
  });
}

}  // namespace
}  // namespace cpu

namespace {

at::Tensor meta(const BufferedStep& a) { return fresh_output(check_buffered_step(a), a.v); }

constexpr Refusal kRefusal{kName,
                           "decoding on a pool has no gradient, call gla_ext.fused_recurrent_gla, "
                           "or run it under torch.no_grad()"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "recurrent_gla_buffered_step_(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor(a!) state, "
         "Tensor? slots, Tensor(b!) buffer_k, Tensor(c!) buffer_v, Tensor(d!) buffer_g, Tensor "
         "count, float? scale, bool state_v_first) -> Tensor");
  autocast_first<3, recurrent_gla_buffered_step_>(m, kName);
  in_place<recurrent_gla_buffered_step_, kRefusal>(m, kName);
  refuse_vmap(m, {kName});
}

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl(kName, by_arguments<recurrent_gla_buffered_step_, cpu::buffered_step>);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl(kName, by_arguments<recurrent_gla_buffered_step_, meta>);
}

}  // namespace gla_ext
