// gla_ext._C: everything that is not a tensor operator. The only file that includes Python headers.
#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>

#include "cpu/host/plan.h"
#include "cpu/kernel_tables.h"
#include "cuda/plan/plan.h"
#if defined(GLA_EXT_CUDA)
#include "cuda/host/workspaces.h"
#endif

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

// The inputs of a plan, as the CUDA plan takes them, and the dtype's name.
struct PlanRequest {
  gla_ext::cuda::PlanInputs in;
  std::string dtype;
};

py::dict cpu_pass(const PlanRequest& r, bool backward, int64_t threads) {
  namespace cpu = gla_ext::cpu;
  cpu::PlanInputs in{r.in.N, r.in.T, r.in.H, r.in.K, r.in.V, r.in.packed, backward};
  in.value_gated = r.in.value_gated;
  in.accumulate_bytes_each = r.dtype == "float64" ? 8 : 4;
  in.state_bytes_each = r.dtype == "bfloat16" ? 2 : in.accumulate_bytes_each;
  const cpu::Plan p = cpu::make_plan(in, threads);
  py::dict result;
  result["mode"] = p.mode == cpu::Mode::kSweep ? "sweep" : "materialised";
  result["threads"] = p.threads;
  result["tasks"] = p.tasks;
  result["workspace_bytes"] = p.workspace_bytes;
  result["state_bytes"] = p.state_bytes;
  return result;
}

py::dict cpu_plan(const PlanRequest& r, int64_t threads) {
  py::dict result;
  result["path"] = "cpu";
  result["forward"] = cpu_pass(r, /*backward=*/false, threads);
  result["backward"] = cpu_pass(r, /*backward=*/true, threads);
  return result;
}

gla_ext::cuda::DType cuda_dtype(const std::string& name) {
  using gla_ext::cuda::DType;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kHalf;
  if (name == "float32") return DType::kFloat;
  throw py::value_error("plan: expected dtype bfloat16, float16 or float32 on cuda, got " + name);
}

py::dict cuda_pass(const gla_ext::cuda::PassPlan& p) {
  py::list kernels;
  for (const auto& [kernel, side] : p.kernels) {
    const std::string name = gla_ext::cuda::name_of(kernel);
    kernels.append(side == gla_ext::cuda::Side::kKeys ? name : name + " of values");
  }
  py::dict result;
  result["kernels"] = kernels;
  result["segments"] = p.segments.segments;
  result["segment_chunks"] = p.segments.segment_chunks;
  result["segment_states"] = p.segments.segment_states;
  result["summaries_at_once"] = p.segments.summaries_at_once;
  result["replays"] = p.segments.replays;
  result["items_each"] = p.items_each;
  result["workspace_bytes"] = p.workspace.bytes();
  result["summary_kernels"] = p.summary_kernels;
  result["summary_bytes"] = p.summary.bytes();
  result["state_bytes"] = p.state_bytes;
  return result;
}

py::dict cuda_plan(PlanRequest r, const std::string& gate_dtype) {
  namespace cuda = gla_ext::cuda;
  cuda::PlanInputs& in = r.in;
  if (std::max(in.K, in.V) > cuda::kMaxHeadDim)
    throw py::value_error(
        "plan: expected K and V to be at most " + std::to_string(cuda::kMaxHeadDim) +
        " on cuda, got K = " + std::to_string(in.K) + " and V = " + std::to_string(in.V));
  const cuda::DType given = cuda_dtype(r.dtype);
  in.dtype = cuda::becomes_fp32(given, in.value_gated) ? cuda::DType::kFloat : given;
  in.gate_dtype = in.value_gate_dtype = cuda_dtype(gate_dtype);
  const cuda::CallPlan p = cuda::make_plan(in);
  const char* missing = cuda::why_not_fused(in);
  py::dict result;
  result["path"] = p.path == cuda::Path::kFused ? "fused" : "steps";
  result["fused_expects"] = missing == nullptr ? py::object(py::none()) : py::str(missing);
  result["forward"] = cuda_pass(p.forward);
  result["backward"] = cuda_pass(p.backward);
  result["for_backward_bytes"] = p.for_backward.bytes();
  return result;
}

py::dict plan(int64_t B, int64_t T, int64_t H, int64_t K, int64_t V, std::optional<int64_t> N,
              const std::string& dtype, const std::optional<std::string>& gate_dtype,
              bool batch_invariant, bool aligned, bool key_gated, bool value_gated, bool head_gated,
              bool gate_gradient, bool for_backward, bool in_halves, bool on_pool,
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
  if (in_halves && N.has_value())
    throw py::value_error("plan: expected no packed sequences in halves, got N = " +
                          std::to_string(*N));
  PlanRequest r{{}, dtype};
  r.in.N = N.value_or(B);
  r.in.T = T;
  r.in.H = H;
  r.in.K = K;
  r.in.V = V;
  r.in.packed = N.has_value();
  r.in.batch_invariant = batch_invariant;
  r.in.aligned = aligned;
  r.in.sm90 = capability == "9.0";
  r.in.processors = processors;
  r.in.key_gated = key_gated;
  r.in.value_gated = value_gated;
  r.in.head_gated = head_gated;
  r.in.gate_gradient = gate_gradient;
  r.in.for_backward = for_backward;
  r.in.in_halves = in_halves;
  r.in.on_pool = on_pool;
  return device == "cpu" ? cpu_plan(r, threads.value_or(at::get_num_threads()))
                         : cuda_plan(std::move(r), gate_dtype.value_or(dtype));
}

void drop_workspaces([[maybe_unused]] uintptr_t stream) {
#if defined(GLA_EXT_CUDA)
  gla_ext::cuda::drop_workspaces(reinterpret_cast<void*>(stream));
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information and plans of gla_ext; importing it registers the operators.";
  m.def("build_info", &build_info, "What this module was built with.");
  m.def("cpu_capability", &gla_ext::cpu::capability_in_use,
        "The CPU kernels in use: DEFAULT, AVX2 or AVX512.");
  m.def("plan", &plan, py::arg("B"), py::arg("T"), py::arg("H"), py::arg("K"), py::arg("V"),
        py::arg("N") = py::none(), py::kw_only(), py::arg("dtype") = "float32",
        py::arg("gate_dtype") = py::none(), py::arg("batch_invariant") = false,
        py::arg("aligned") = true, py::arg("key_gated") = true, py::arg("value_gated") = false,
        py::arg("head_gated") = false, py::arg("gate_gradient") = true,
        py::arg("for_backward") = false, py::arg("in_halves") = false, py::arg("on_pool") = false,
        py::arg("capability") = "9.0", py::arg("processors") = 132, py::arg("device") = "cpu",
        py::arg("threads") = py::none(),
        "The plan of both passes for a shape, on any build: the kernels that each launches, its "
        "segments and its memory.");
  m.def("drop_workspaces", &drop_workspaces, py::arg("stream"),
        "Drops torch's workspaces of cuBLAS on a stream.");
}
