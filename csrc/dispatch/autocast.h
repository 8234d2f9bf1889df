// Autocast's kernels: the first arguments of an operator are cast, the others keep their dtype.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <utility>

namespace gla_ext {

// An argument as autocast casts it, or unchanged.
template <c10::DeviceType device, bool casts, typename T>
decltype(auto) cast_if(T& argument, at::ScalarType dtype) {
  if constexpr (casts)
    return at::autocast::cached_cast(dtype, argument, device);
  else
    return (argument);
}

// The autocast kernel of the operator that `call` runs.
template <c10::DeviceType device, size_t count, auto call>
struct CastFirst;

template <c10::DeviceType device, size_t count, typename Result, typename... Args,
          Result (*call)(Args...)>
struct CastFirst<device, count, call> {
  static Result run(Args... args) { return run_at(std::index_sequence_for<Args...>{}, args...); }

 private:
  template <size_t... place>
  static Result run_at(std::index_sequence<place...>, Args... args) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
    return call(cast_if<device, (place < count)>(args, dtype)...);
  }
};

// Registers these kernels for the operator that `call` runs: its first `count` arguments are cast.
template <size_t count, auto call>
void autocast_first(torch::Library& m, const char* name) {
  using c10::DeviceType, c10::DispatchKey;
  m.impl(name,
         torch::dispatch(DispatchKey::AutocastCPU, &CastFirst<DeviceType::CPU, count, call>::run));
  m.impl(name, torch::dispatch(DispatchKey::AutocastCUDA,
                               &CastFirst<DeviceType::CUDA, count, call>::run));
}

}  // namespace gla_ext
