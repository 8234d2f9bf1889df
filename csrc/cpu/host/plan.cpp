#include "plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "cpu/kernels.h"

namespace gla_ext::cpu {
namespace {

// The least share of workers' time that a sweep must use, with `tasks` of equal length on
// `threads`. Below it, materialised states are cheaper, although they need a second pass over the
// gates.
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
  const int64_t longest = (in.T + kChunk - 1) / kChunk;
  const int64_t chunks = in.packed ? in.T / kChunk + in.N : in.N * longest;
  const int64_t sweeps = in.N * in.H, matrix = in.K * in.V;
  Plan plan{choose_mode(sweeps, threads), 0, 0, 0, 0};
  const bool sweep = plan.mode == Mode::kSweep;
  plan.tasks = sweep ? sweeps : chunks * in.H;
  plan.threads = std::min(threads, std::max<int64_t>(plan.tasks, 1));
  const int64_t behind = sweep && in.backward ? longest * matrix : 0;
  const int64_t tiles = kernels<float>().workspace_size(in.K, in.V, in.value_gated);
  plan.workspace_bytes = plan.threads * (tiles + behind) * in.accumulate_bytes_each;
  const int64_t each = in.state_bytes_each + (in.backward ? in.accumulate_bytes_each : 0);
  plan.state_bytes = sweep ? 0 : chunks * in.H * matrix * each;
  return plan;
}

}  // namespace gla_ext::cpu
