// gla_ext._C: what is not a tensor operator. The only file that includes Python headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/plan.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["cuda"] = py::none();
  info["cuda_archs"] = std::vector<std::string>{};
  info["cpu_capabilities"] = gla_ext::cpu::capabilities_built();
#if defined(_OPENMP)
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
  info["cxx"] = __VERSION__;
  return info;
}

py::dict plan(int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, std::optional<int64_t> N,
              const std::string& dtype, bool backward, const std::string& device,
              std::optional<int64_t> threads) {
  if (device != "cpu") throw py::value_error("plan: expected device 'cpu', got '" + device + "'");
  if (std::min({B, T, H, N.value_or(0)}) < 0 || std::min({K, V, threads.value_or(1)}) < 1)
    throw py::value_error("plan: expected B, T, H, N >= 0 and K, V, threads >= 1");
  if (N.has_value() && B != 1)
    throw py::value_error("plan: expected B = 1 with N packed sequences, got " + std::to_string(B));
  const bool fp64 = dtype == "float64";
  if (!fp64 && dtype != "float32" && dtype != "float16" && dtype != "bfloat16")
    throw py::value_error("plan: expected dtype bfloat16, float16, float32 or float64, got " +
                          dtype);
  const int64_t accumulate = fp64 ? 8 : 4;
  const auto p = gla_ext::cpu::make_plan({N.value_or(B), T, H, K, V, N.has_value(), backward,
                                          dtype == "bfloat16" ? 2 : accumulate, accumulate},
                                         threads.value_or(gla_ext::cpu::available_threads()));
  py::dict result;
  result["path"] = "cpu";
  result["mode"] = p.mode == gla_ext::cpu::Mode::kSweep ? "sweep" : "materialised";
  result["threads"] = p.threads;
  result["tasks"] = p.tasks;
  result["workspace_bytes"] = p.workspace_bytes;
  result["state_bytes"] = p.state_bytes;
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information and plans of gla_ext; importing it registers the operators.";
  m.def("build_info", &build_info, "What this module was built with.");
  m.def("cpu_capability", &gla_ext::cpu::capability_in_use,
        "The CPU kernels in use: DEFAULT, AVX2 or AVX512.");
  m.def("plan", &plan, py::arg("B"), py::arg("T"), py::arg("H"), py::arg("K"), py::arg("V"),
        py::arg("N") = py::none(), py::kw_only(), py::arg("dtype") = "float32",
        py::arg("backward") = false, py::arg("device") = "cpu", py::arg("threads") = py::none(),
        "The plan chosen for a shape: path, mode, threads, tasks, workspace and state bytes.");
}
