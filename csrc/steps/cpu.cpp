// The ten steps as separate operators. Each reads its inputs from memory and returns its
// intermediate result.
#include "cpu/host/call.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

// One call, whose inputs are in its Problem.
template <typename T>
class Step {
 public:
  Step(const StepInputs& in, const Shape& shape)
      : in_(in), call_(in.op, shape, in.cu_seqlens, in.scale) {
    call_.problem.state_v_first = in.state_v_first;
    const std::pair<Rows P::*, const at::Tensor*> inputs[] = {
        {&P::q, in.q},         {&P::k, in.k},         {&P::v, in.v},
        {&P::d_o, in.d_o},     {&P::g, in.g},         {&P::b, in.b},
        {&P::A, in.A},         {&P::dA, in.dA},       {&P::A_diagonal, in.A_diagonal},
        {&P::dq_intra, in.dq}, {&P::dk_intra, in.dk}, {&P::dg_intra, in.dg}};
    for (const auto& [rows, t] : inputs)
      if (t != nullptr) call_.inputs({{rows, *t}});
    if (in.S != nullptr) call_.input_chunk_states(*in.S);
    if (in.dS != nullptr) call_.input_chunk_state_grads(*in.dS);
    call_.input_state(&P::h0, in.initial_state);
    call_.input_state(&P::dht, in.dht);
  }

  at::Tensor run(GateCumsum) { return filled(kernels().gate_cumsum, rows(&P::b, K())); }
  TwoTensors run(ChunkStates) {
    at::Tensor S = call_.output_chunk_states(like_, kAccumulate);
    return filled(kernels().state_pass, TwoTensors{S, call_.output_state(&P::ht, like_)});
  }
  at::Tensor run(ScoresOffDiagonal) {
    return filled(kernels().scores_off_diagonal, rows(&P::A, kChunk));
  }
  at::Tensor run(ScoresDiagonal) {
    return filled(kernels().scores_diagonal, rows(&P::A_diagonal, kSubChunk));
  }
  at::Tensor run(Output) { return filled(kernels().output, rows(&P::o, V(), in_.v)); }
  TwoTensors run(StateGrads) {
    at::Tensor dS = call_.output_chunk_state_grads(like_);
    return filled(kernels().state_grad_pass, TwoTensors{dS, call_.output_state(&P::dh0, like_)});
  }
  at::Tensor run(ValueGrads) { return filled(kernels().value_grads, rows(&P::dv, V(), in_.d_o)); }
  at::Tensor run(ScoreGrads) { return filled(kernels().score_grads, rows(&P::dA, kChunk)); }
  ThreeTensors run(IntraGrads) {
    return filled(kernels().intra_grads,
                  ThreeTensors{rows(&P::dq, K()), rows(&P::dk, K()), rows(&P::dg, K())});
  }
  ThreeTensors run(MergeGrads) {
    return filled(kernels().merge_grads, ThreeTensors{rows(&P::dq, K(), in_.q),
                                                      rows(&P::dk, K(), in_.k), rows(&P::dg, K())});
  }

 private:
  using P = Problem<T>;
  static constexpr at::ScalarType kAccumulate = c10::CppTypeToScalarType<T>::value;

  static const Kernels<T>& kernels() { return cpu::kernels<T>(); }
  int64_t K() const { return call_.problem.K; }
  int64_t V() const { return call_.problem.V; }
  // An output, of the dtype of `like` or an intermediate.
  at::Tensor rows(Rows P::* rows, int64_t last_dim, const at::Tensor* like = nullptr) {
    return call_.output(rows, last_dim, like_, like == nullptr ? kAccumulate : like->scalar_type());
  }
  // Returns the outputs, once the task has filled them.
  template <typename Task, typename Outputs>
  Outputs filled(Task task, Outputs outputs) const {
    call_.run(task);
    return outputs;
  }

  const StepInputs& in_;
  const at::Tensor& like_ = in_.first();
  Call<T> call_;
};

struct Backend {
  template <class Operator>
  static auto run(const StepInputs& in, Operator step) {
    const Shape shape = check_step(in);
    return with_accumulate(shape.accumulate,
                           [&](auto type) { return Step<decltype(type)>(in, shape).run(step); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) { register_steps<Backend>(m); }

}  // namespace gla_ext::cpu
