// Verification of drafts: the choice between the chunk form and the recurrence, and the chunk form
// on fp32 states.
#include "verify.cuh"

namespace gla_ext::cuda {
namespace {

void chunk_form(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  switch (p.state_dtype) {
    case DType::kBFloat16:
      return recurrent_verify_bf16(p, multiprocessors, stream);
    case DType::kHalf:
      return recurrent_verify_fp16(p, multiprocessors, stream);
    case DType::kFloat:
      return recurrent::launch_verify<float>(p, multiprocessors, stream);
  }
}

}  // namespace

void recurrent_verify(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  if (count_runs(p) == 0) return;
  const bool packed = p.cu_seqlens.data != nullptr;
  if (!packed && (p.T < 2 || p.T > kDrafts)) return recurrent_forward(p, stream);
  chunk_form(p, multiprocessors, stream);
  if (!packed || p.T <= kDrafts) return;
  Recurrence longer = p;  // for packed drafts, whose lengths the host does not know
  longer.least_tokens = kDrafts + 1;
  recurrent_forward(longer, stream);
}

}  // namespace gla_ext::cuda
