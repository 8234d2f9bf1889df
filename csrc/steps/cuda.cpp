// The ten steps as separate operators. Each reads its inputs from memory and returns its
// intermediate result, in fp32.
#include "cuda/host/call.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

// One call, whose inputs are in its Problem.
class Step {
 public:
  Step(const StepInputs& in, const Shape& shape)
      : in_(in), call_(in.op, shape, in.first(), in.cu_seqlens, in.scale) {
    p_.state_v_first = in.state_v_first;
    const std::pair<Rows*, const at::Tensor*> inputs[] = {
        {&p_.q, in.q},         {&p_.k, in.k},         {&p_.v, in.v},
        {&p_.d_o, in.d_o},     {&p_.g, in.g},         {&p_.b, in.b},
        {&p_.A, in.A},         {&p_.dA, in.dA},       {&p_.A_diagonal, in.A_diagonal},
        {&p_.dq_intra, in.dq}, {&p_.dk_intra, in.dk}, {&p_.dg_intra, in.dg}};
    for (const auto& [rows, t] : inputs)
      if (t != nullptr) call_.input(*rows, *t);
    if (in.S != nullptr) call_.input_chunk_states(p_.S, p_.S_dtype, *in.S);
    if (in.dS != nullptr) call_.input_chunk_states(p_.dS, p_.dS_dtype, *in.dS);
    p_.h0 = call_.input_state(in.initial_state);
    p_.dht = call_.input_state(in.dht);
  }

  at::Tensor run(GateCumsum) { return filled({Kernel::kGateCumsum}, rows(p_.b, p_.K)); }
  TwoTensors run(ChunkStates) {
    at::Tensor S = call_.output_chunk_states(p_.S, p_.S_dtype, at::kFloat);
    return filled({Kernel::kChunkStates}, TwoTensors{S, call_.output_state(p_.ht)});
  }
  at::Tensor run(ScoresOffDiagonal) {
    return filled(
        {Kernel::kChunkTiers, Kernel::kScoresOffDiagonal, Kernel::kStrongScoresOffDiagonal},
        rows(p_.A, kChunk), /*tiers=*/true);
  }
  at::Tensor run(ScoresDiagonal) {
    return filled({Kernel::kScoresDiagonal}, rows(p_.A_diagonal, kSubChunk));
  }
  at::Tensor run(Output) { return filled({Kernel::kOutput}, rows(p_.o, p_.V, in_.v)); }
  TwoTensors run(StateGrads) {
    at::Tensor dS = call_.output_chunk_states(p_.dS, p_.dS_dtype, at::kFloat);
    return filled({Kernel::kStateGrads}, TwoTensors{dS, call_.output_state(p_.dh0)});
  }
  at::Tensor run(ValueGrads) { return filled({Kernel::kValueGrads}, rows(p_.dv, p_.V, in_.d_o)); }
  at::Tensor run(ScoreGrads) { return filled({Kernel::kScoreGrads}, rows(p_.dA, kChunk)); }
  ThreeTensors run(IntraGrads) {
    return filled(
        {Kernel::kChunkTiers, Kernel::kIntraGrads, Kernel::kStrongIntraGrads},
        ThreeTensors{rows(p_.dq_intra, p_.K), rows(p_.dk_intra, p_.K), rows(p_.dg_intra, p_.K)},
        /*tiers=*/true);
  }
  ThreeTensors run(MergeGrads) {
    return filled({Kernel::kMergeGrads}, ThreeTensors{rows(p_.dq, p_.K, in_.q),
                                                      rows(p_.dk, p_.K, in_.k), rows(p_.dg, p_.K)});
  }

 private:
  // An output, of the dtype of `like` or an intermediate.
  at::Tensor rows(Rows& rows, int64_t last_dim, const at::Tensor* like = nullptr) {
    return call_.output(rows, last_dim, like == nullptr ? at::kFloat : like->scalar_type());
  }
  // Returns the outputs, once the kernels are launched.
  template <typename Outputs>
  Outputs filled(std::initializer_list<Kernel> kernels, Outputs outputs, bool tiers = false) {
    call_.run_step(kernels, tiers);
    return outputs;
  }

  const StepInputs& in_;
  Call call_;
  Problem& p_ = call_.problem;
};

struct Backend {
  template <class Operator>
  static auto run(const StepInputs& in, Operator step) {
    return Step(in, check_step(in)).run(step);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) { register_steps<Backend>(m); }

}  // namespace gla_ext::cuda
