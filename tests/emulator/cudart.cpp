// The CUDA runtime as torch and gla_ext call it, for a GPU that is this emulator: memory is the
// host's, streams run at once, and kernels are looked up by name in the PTX of the extension. To be
// loaded before the real runtime (LD_PRELOAD). streams.cpp has its streams and events,
// allocations.cpp its memory.
//
// Environment: GLA_EMULATOR_PTX, a file; GLA_EMULATOR_PROCESSORS, how many multiprocessors there
// are; GLA_EMULATOR_SEED, GLA_EMULATOR_HAZARDS, see `run`; GLA_EMULATOR_LAUNCHES=0: kernels do
// nothing, which leaves the host's time.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>
#include <sstream>

#include "machine.h"

namespace {

using emulator::environment;
using emulator::Launch;

// What a kernel's host function is called on the device.
std::unordered_map<const void*, std::string>& names() {
  static std::unordered_map<const void*, std::string> all;
  return all;
}

std::recursive_mutex mutex;  // of all that is below

// The last thing that went wrong, as torch asks for it behind every launch.
thread_local cudaError_t last_error = cudaSuccess;
std::string last_fault = "no error";

cudaError_t fault(const std::string& what) {
  last_fault = "emulated GPU: " + what;
  return last_error = cudaErrorLaunchFailure;
}

[[noreturn]] void stop(const std::string& why) {
  std::cerr << "emulated GPU: " << why << std::endl;
  std::abort();
}

emulator::Module& module() {
  static emulator::Module kernels = [] {
    const char* name = environment("GLA_EMULATOR_PTX", "");
    std::ifstream file(name);
    if (!file) stop("GLA_EMULATOR_PTX: there is no file '" + std::string(name) + "'");
    std::stringstream text;
    text << file.rdbuf();
    return emulator::Module(text.str());
  }();
  return kernels;
}

const std::string& name_of(const void* function) {
  const auto at = names().find(function);
  if (at == names().end()) stop("a kernel that nobody has registered is launched");
  return at->second;
}

// How the blocks of a launch are run together, and after which others.
struct Order {
  const void* stream;
  uint32_t cluster = 1;
  bool overlaps = false;
};

Launch to_launch(const emulator::Kernel& kernel, dim3 grid, dim3 block, void** arguments,
                 size_t shared_bytes, const Order& order) {
  Launch l;
  l.kernel = &kernel;
  l.grid = {grid.x, grid.y, grid.z};
  l.block = {block.x, block.y, block.z};
  l.cluster = order.cluster;
  l.stream = order.stream;
  l.overlaps = order.overlaps;
  l.dynamic_shared_bytes = static_cast<uint32_t>(shared_bytes);
  l.parameters.resize(kernel.parameter_bytes);
  for (size_t i = 0; i < kernel.parameters.size(); ++i)
    std::memcpy(l.parameters.data() + kernel.parameters[i].offset, arguments[i],
                kernel.parameters[i].bytes);
  return l;
}

// That a block may have.
size_t shared_bytes() {
  return size_t{1024} * std::atoi(environment("GLA_EMULATOR_SHARED", "227"));
}

// The dynamic shared memory that a kernel was allowed beyond what each has.
std::unordered_map<const void*, size_t>& allowed_bytes() {
  static std::unordered_map<const void*, size_t> all;
  return all;
}

// What keeps a GPU from starting such blocks, or nothing.
std::string why_not(const void* function, const emulator::Kernel& kernel, dim3 grid, dim3 block,
                    size_t dynamic) {
  constexpr size_t kOfEvery = 48 << 10, kMostThreads = 1024, kMostAcross = 65535;
  const size_t bytes = kernel.shared_bytes + dynamic;
  const auto allowed = allowed_bytes().find(function);
  const std::string of_shared = std::to_string(bytes) + " bytes of shared memory a block, ";
  if (bytes > shared_bytes())
    return of_shared + "of which there are " + std::to_string(shared_bytes());
  if (bytes > kOfEvery && (allowed == allowed_bytes().end() || dynamic > allowed->second))
    return of_shared + "which cudaFuncSetAttribute has not allowed it";
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads) return std::to_string(threads) + " threads a block";
  if (grid.x == 0 || grid.x > 0x7fffffff || grid.y == 0 || grid.y > kMostAcross || grid.z == 0 ||
      grid.z > kMostAcross)
    return std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
           std::to_string(grid.z) + " blocks";
  return "";
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, size_t bytes,
                   const Order& order) {
  static const bool runs = std::string(environment("GLA_EMULATOR_LAUNCHES", "1")) != "0";
  if (!runs) return cudaSuccess;
  const std::lock_guard lock(mutex);
  const std::string& name = name_of(function);
  try {
    const emulator::Kernel* kernel = module().find(name);
    if (kernel == nullptr) return fault("there is no PTX of " + name + ", which is launched");
    const std::string why = why_not(function, *kernel, grid, block, bytes);
    if (!why.empty()) return fault(name + " is launched with " + why);
    emulator::run(to_launch(*kernel, grid, block, arguments, bytes, order));
  } catch (const std::exception& error) {
    return fault(error.what());
  }
  return cudaSuccess;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

int processors() { return std::atoi(environment("GLA_EMULATOR_PROCESSORS", "132")); }

}  // namespace

extern "C" {

// --- kernels

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(mutex);
  names()[function] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     CUstream_st* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  const Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared_bytes = c.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, shared_bytes, {stream});
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t stream) {
  return launch(function, grid, block, arguments, shared_bytes, {stream});
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  Order order{config->stream};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const auto& value = config->attrs[i].val;
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      order.cluster = value.clusterDim.x;
    if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      order.overlaps = value.programmaticStreamSerializationAllowed != 0;
  }
  return launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                order);
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  const std::lock_guard lock(mutex);
  const emulator::Kernel* kernel = module().find(name_of(function));
  if (kernel == nullptr || kernel->shared_bytes + value > shared_bytes())
    return last_error = cudaErrorInvalidValue;
  allowed_bytes()[function] = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  const std::lock_guard lock(mutex);
  *attributes = {};
  const emulator::Kernel* kernel = module().find(name_of(function));
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  attributes->sharedSizeBytes = kernel->shared_bytes;
  attributes->binaryVersion = 90;
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

// --- the GPU

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {};
  std::snprintf(p->name, sizeof(p->name), "emulated GPU");
  p->major = 9;
  p->multiProcessorCount = processors();
  p->totalGlobalMem = size_t{16} << 30;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = shared_bytes();
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->reservedSharedMemPerBlock = 1 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = emulator::kLanes;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  for (int i = 0; i < 3; ++i) {
    p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    p->maxGridSize[i] = i == 0 ? 0x7fffffff : 65535;
  }
  p->l2CacheSize = 50 << 20;
  p->unifiedAddressing = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  std::snprintf(id, static_cast<size_t>(length), "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *entry = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  const std::lock_guard lock(mutex);
  return error == cudaErrorLaunchFailure ? last_fault.c_str() : "an error of the emulated GPU";
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheEmulatedGPU"; }

}  // extern "C"
