// From a kernel of the plan to the function that launches it.
#include "cuda/sm90/head_gates/head_gates.h"
#include "cuda/sm90/sm90.h"
#include "launchers.h"

namespace gla_ext::cuda {
namespace {

// A launcher that takes one side of the call, or both.
struct Launcher {
  void (*one)(const Problem&, cudaStream_t) = nullptr;
  void (*both)(const Problem&, const Problem&, cudaStream_t) = nullptr;

  constexpr Launcher(void (*f)(const Problem&, cudaStream_t)) : one(f) {}
  constexpr Launcher(void (*f)(const Problem&, const Problem&, cudaStream_t)) : both(f) {}
};

constexpr Launcher kLaunchers[] = {
#define GLA_LAUNCHER(kernel, name, launcher) launcher,
    GLA_CUDA_KERNELS(GLA_LAUNCHER)
#undef GLA_LAUNCHER
};

}  // namespace

void launch(Kernel kernel, const Problem& p, const Problem& value_side, cudaStream_t stream) {
  const Launcher& launcher = kLaunchers[static_cast<size_t>(kernel)];
  if (launcher.both != nullptr)
    launcher.both(p, value_side, stream);
  else
    launcher.one(p, stream);
}

}  // namespace gla_ext::cuda
