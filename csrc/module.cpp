// gla_ext._C: what is not a tensor operator. The only file that includes Python headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "cuda/plan.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
#if defined(GLA_EXT_CUDA)
  info["cuda"] = GLA_EXT_CUDA;
  info["cuda_archs"] = py::str(GLA_EXT_CUDA_ARCHS).attr("split")(";");
#else
  info["cuda"] = py::none();
  info["cuda_archs"] = py::list();
#endif
  info["cpu_capabilities"] = gla_ext::cpu::capabilities_built();
#if defined(_OPENMP)
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
  info["cxx"] = __VERSION__;
  return info;
}

struct PlanShape {
  int64_t N, T, H, K, V;
  bool packed;
};

py::dict cpu_plan(const PlanShape& s, const std::string& dtype, bool backward, bool value_gated,
                  std::optional<int64_t> threads) {
  const int64_t accumulate = dtype == "float64" ? 8 : 4;
  const auto p = gla_ext::cpu::make_plan({s.N, s.T, s.H, s.K, s.V, s.packed, backward, value_gated,
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

gla_ext::cuda::DType cuda_dtype(const std::string& name) {
  using gla_ext::cuda::DType;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kHalf;
  if (name == "float32") return DType::kFloat;
  throw py::value_error("plan: expected dtype bfloat16, float16 or float32 on cuda, got " + name);
}

py::dict cuda_plan(const PlanShape& s, const std::string& dtype, const std::string& gate_dtype,
                   bool backward, bool batch_invariant, bool aligned, bool key_gated,
                   bool value_gated, bool kept, const std::string& capability, int64_t processors) {
  namespace cuda = gla_ext::cuda;
  const cuda::DType given = cuda_dtype(dtype), gate_type = cuda_dtype(gate_dtype);
  const cuda::DType type = cuda::becomes_fp32(given, value_gated) ? cuda::DType::kFloat : given;
  if (std::max(s.K, s.V) > cuda::kMaxHeadDim)
    throw py::value_error(
        "plan: expected K and V to be at most " + std::to_string(cuda::kMaxHeadDim) +
        " on cuda, got K = " + std::to_string(s.K) + " and V = " + std::to_string(s.V));
  const auto p = cuda::make_plan({s.N, s.T, s.H, s.K, s.V, s.packed, type, gate_type, backward,
                                  batch_invariant, aligned, capability == "9.0", processors,
                                  cuda::PathChoice::kAny, key_gated, value_gated, gate_type, kept});
  py::dict tiles, result;
  tiles["chunk"] = gla_ext::kChunk;
  tiles["sub_chunk"] = gla_ext::kSubChunk;
  tiles["channels"] = cuda::kTierBlock;
  result["path"] = p.path == cuda::Path::kFused ? "fused" : "steps";
  result["mode"] = p.state_bytes > 0 ? "materialised" : "sweep";
  result["linear"] = p.linear;
  result["paired_states"] = p.paired_states;
  result["paired_parts"] = p.paired_parts;
  result["packed_parts"] = p.packed_parts;
  result["paired_chunks"] = p.paired_chunks;
  result["scores"] = p.scores;
  result["cluster_pieces"] = p.cluster_pieces;
  result["block_pieces"] = p.block_pieces;
  result["swept_gradients"] = p.swept_gradients;
  result["segments"] = p.segments;
  result["prefixed"] = p.prefixed;
  result["segment_chunks"] = p.segment_chunks;
  result["segment_states"] = p.segment_states;
  result["parts_at_once"] = p.parts_at_once;
  result["tiles"] = tiles;
  result["launches"] = p.launches;
  result["workspace_bytes"] = p.workspace.bytes;
  result["state_bytes"] = p.state_bytes;
  result["kept_bytes"] = p.kept.bytes;
  return result;
}

py::dict plan(int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, std::optional<int64_t> N,
              const std::string& dtype, const std::optional<std::string>& gate_dtype, bool backward,
              bool batch_invariant, bool aligned, bool key_gated, bool value_gated, bool kept,
              const std::string& capability, int64_t processors, const std::string& device,
              std::optional<int64_t> threads) {
  if (device != "cpu" && device != "cuda")
    throw py::value_error("plan: expected device 'cpu' or 'cuda', got '" + device + "'");
  if (std::min({B, T, H, N.value_or(0)}) < 0 ||
      std::min({K, V, processors, threads.value_or(1)}) < 1)
    throw py::value_error("plan: expected B, T, H, N >= 0 and K, V, threads >= 1");
  if (N.has_value() && B != 1)
    throw py::value_error("plan: expected B = 1 with N packed sequences, got " + std::to_string(B));
  if (dtype != "float64" && dtype != "float32" && dtype != "float16" && dtype != "bfloat16")
    throw py::value_error("plan: expected dtype bfloat16, float16, float32 or float64, got " +
                          dtype);
  const PlanShape shape{N.value_or(B), T, H, K, V, N.has_value()};
  return device == "cpu"
             ? cpu_plan(shape, dtype, backward, value_gated, threads)
             : cuda_plan(shape, dtype, gate_dtype.value_or(dtype), backward, batch_invariant,
                         aligned, key_gated, value_gated, kept, capability, processors);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information and plans of gla_ext; importing it registers the operators.";
  m.def("build_info", &build_info, "What this module was built with.");
  m.def("cpu_capability", &gla_ext::cpu::capability_in_use,
        "The CPU kernels in use: DEFAULT, AVX2 or AVX512.");
  m.def("plan", &plan, py::arg("B"), py::arg("T"), py::arg("H"), py::arg("K"), py::arg("V"),
        py::arg("N") = py::none(), py::kw_only(), py::arg("dtype") = "float32",
        py::arg("gate_dtype") = py::none(), py::arg("backward") = false,
        py::arg("batch_invariant") = false, py::arg("aligned") = true, py::arg("key_gated") = true,
        py::arg("value_gated") = false, py::arg("kept") = false, py::arg("capability") = "9.0",
        py::arg("processors") = 132, py::arg("device") = "cpu", py::arg("threads") = py::none(),
        "The plan chosen for a shape, on any build: path, mode, workspace and state bytes; on CPU "
        "threads and tasks, on CUDA tiles, segments, launches and what is kept for backward.");
}
