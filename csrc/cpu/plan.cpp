#include "plan.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "kernels.h"

namespace gla_ext::cpu {
namespace {

// The share of workers' time that a sweep uses, `tasks` of one length over `threads`; below this,
// the second pass over the gates that materialised states cost is the cheaper price.
constexpr double kWorthSweeping = 0.75;

Mode choose_mode(int64_t tasks, int64_t threads) {
  if (const char* forced = std::getenv("GLA_EXT_CPU_MODE")) {
    const std::string mode(forced);
    if (mode == "sweep") return Mode::kSweep;
    if (mode == "materialised") return Mode::kMaterialised;
    TORCH_CHECK_VALUE(mode.empty(), "GLA_EXT_CPU_MODE: expected sweep or materialised, got ", mode);
  }
  const int64_t rounds = (tasks + threads - 1) / threads;
  return static_cast<double>(tasks) >= kWorthSweeping * static_cast<double>(rounds * threads)
             ? Mode::kSweep
             : Mode::kMaterialised;
}

}  // namespace

Plan make_plan(const PlanInputs& in, int64_t threads) {
  threads = std::max<int64_t>(threads, 1);
  const int64_t sweeps = in.N * in.H, chunks = (in.T + kChunk - 1) / kChunk;
  Plan plan{choose_mode(sweeps, threads), 0, 0, 0, 0};
  const bool sweep = plan.mode == Mode::kSweep;
  plan.tasks = sweep ? sweeps : sweeps * chunks;
  plan.threads = std::min(threads, std::max<int64_t>(plan.tasks, 1));
  const int64_t matrix = in.K * in.V * static_cast<int64_t>(sizeof(float));
  const int64_t behind = sweep && in.backward ? chunks * matrix : 0;
  const int64_t tiles =
      kernels<float>().workspace_size(in.K, in.V) * static_cast<int64_t>(sizeof(float));
  plan.workspace_bytes = plan.threads * (tiles + behind);
  plan.state_bytes = sweep ? 0 : sweeps * chunks * matrix * (in.backward ? 2 : 1);
  return plan;
}

int64_t available_threads() { return at::get_num_threads(); }

}  // namespace gla_ext::cpu
