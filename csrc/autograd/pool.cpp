// The operators on a pool of states have no gradient: they say so instead of losing it. One key
// below, where inference mode passes too, they tell autograd, which may have saved the pool, that
// they write to it. Decoding calls them once a layer and token, so each is unboxed.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <type_traits>

#include "arguments.h"
#include "refuse.h"

namespace gla_ext {
namespace {

struct Refusal {
  const char *op, *instead;
};

constexpr const char* kInsteadOfDecoding =
    "decoding on a pool has no gradient, call gla_ext.fused_recurrent_gla, or run it under "
    "torch.no_grad()";
constexpr Refusal kStep{"recurrent_gla_step_", kInsteadOfDecoding};
constexpr Refusal kVerify{"recurrent_gla_verify", kInsteadOfDecoding};
constexpr Refusal kCommit{"recurrent_gla_commit_", kInsteadOfDecoding};
constexpr Refusal kConvolution{"short_convolution_",
                               "decoding on a pool has no gradient, call a ShortConvolution, or "
                               "run it under torch.no_grad()"};
constexpr Refusal kChunks{"chunk_gla_",
                          "a pool of states has no gradient, call gla_ext.chunk_gla, or run it "
                          "under torch.no_grad()"};

// One argument of a call. Those that are no tensors pass.
template <typename T>
void refuse_argument(const Refusal& refusal, const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    refuse_gradient(refusal.op, argument, refusal.instead);
  } else if constexpr (std::is_same_v<T, OptionalTensor>) {
    if (given(argument)) refuse_gradient(refusal.op, *argument, refusal.instead);
  }
}

// Written are the tensors that a call takes as at::Tensor&.
void tell_if_written(at::Tensor& written) { tell_autograd(written); }
template <typename T>
void tell_if_written(const T&) {}

// The kernels of the operator that `call` runs, with its arguments.
template <auto call>
struct OnPool;

template <typename Result, typename... Args, Result (*call)(Args...)>
struct OnPool<call> {
  template <const Refusal& refusal>
  static Result refuse(Args... args) {
    (refuse_argument(refusal, args), ...);
    // What writes goes to run_and_tell next.
    constexpr bool writes = (std::is_same_v<Args, at::Tensor&> || ...);
    std::conditional_t<writes, at::AutoDispatchBelowAutograd, at::AutoDispatchBelowADInplaceOrView>
        below;
    return call(args...);
  }

  static Result run_and_tell(Args... args) {
    const auto run = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      return call(args...);
    };
    if constexpr (std::is_void_v<Result>) {
      run();
      (tell_if_written(args), ...);
    } else {
      Result result = run();
      (tell_if_written(args), ...);
      return result;
    }
  }
};

// chunk_gla_ writes to an optional tensor too.
at::Tensor run_chunks_and_tell(const PoolArguments& a) {
  at::Tensor o;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    o = dispatch(a);
  }
  tell_autograd(a.state);
  if (given(a.checkpoints)) tell_autograd(*a.checkpoints);
  if (a.out != nullptr) tell_autograd(*a.out);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("recurrent_gla_step_", OnPool<recurrent_gla_step_>::refuse<kStep>);
  m.impl("recurrent_gla_step_.out", OnPool<recurrent_gla_step_out>::refuse<kStep>);
  m.impl("recurrent_gla_verify", OnPool<recurrent_gla_verify>::refuse<kVerify>);
  m.impl("recurrent_gla_verify.out", OnPool<recurrent_gla_verify_out>::refuse<kVerify>);
  m.impl("recurrent_gla_commit_", OnPool<recurrent_gla_commit_>::refuse<kCommit>);
  m.impl("short_convolution_", OnPool<short_convolution_>::refuse<kConvolution>);
  m.impl("short_convolution_.out", OnPool<short_convolution_out>::refuse<kConvolution>);
  m.impl("chunk_gla_", OnPool<chunk_gla_>::refuse<kChunks>);
  m.impl("chunk_gla_.out", OnPool<chunk_gla_out>::refuse<kChunks>);
}

TORCH_LIBRARY_IMPL(gla_ext, ADInplaceOrView, m) {
  m.impl("recurrent_gla_step_", OnPool<recurrent_gla_step_>::run_and_tell);
  m.impl("recurrent_gla_step_.out", OnPool<recurrent_gla_step_out>::run_and_tell);
  m.impl("recurrent_gla_verify.out", OnPool<recurrent_gla_verify_out>::run_and_tell);
  m.impl("recurrent_gla_commit_", OnPool<recurrent_gla_commit_>::run_and_tell);
  m.impl("short_convolution_", OnPool<short_convolution_>::run_and_tell);
  m.impl("short_convolution_.out", OnPool<short_convolution_out>::run_and_tell);
  m.impl("chunk_gla_", positional<run_chunks_and_tell>);
  m.impl("chunk_gla_.out", positional_out<run_chunks_and_tell>);
}

}  // namespace gla_ext
