// The operators on a pool of states have no gradient.
#include <torch/library.h>

#include "dispatch/in_place.h"
#include "ops.h"

namespace gla_ext {
namespace {

constexpr const char* kInsteadOfDecoding =
    "decoding on a pool has no gradient, call gla_ext.fused_recurrent_gla, or run it under "
    "torch.no_grad()";
constexpr Refusal kStep{"recurrent_gla_step_", kInsteadOfDecoding};
constexpr Refusal kVerify{"recurrent_gla_verify", kInsteadOfDecoding};
constexpr Refusal kCommit{"recurrent_gla_commit_", kInsteadOfDecoding};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("recurrent_gla_step_", InPlace<recurrent_gla_step_>::refuse<kStep>);
  m.impl("recurrent_gla_step_.out", InPlace<recurrent_gla_step_out>::refuse<kStep>);
  m.impl("recurrent_gla_verify", InPlace<recurrent_gla_verify>::refuse<kVerify>);
  m.impl("recurrent_gla_verify.out", InPlace<recurrent_gla_verify_out>::refuse<kVerify>);
  m.impl("recurrent_gla_commit_", InPlace<recurrent_gla_commit_>::refuse<kCommit>);
}

TORCH_LIBRARY_IMPL(gla_ext, ADInplaceOrView, m) {
  m.impl("recurrent_gla_step_", InPlace<recurrent_gla_step_>::run_and_tell);
  m.impl("recurrent_gla_step_.out", InPlace<recurrent_gla_step_out>::run_and_tell);
  m.impl("recurrent_gla_verify.out", InPlace<recurrent_gla_verify_out>::run_and_tell);
  m.impl("recurrent_gla_commit_", InPlace<recurrent_gla_commit_>::run_and_tell);
}

}  // namespace gla_ext
