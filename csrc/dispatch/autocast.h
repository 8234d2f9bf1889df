// Autocast's kernels: the first arguments of an operator are cast, the others keep their dtype.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <utility>

#include "common/shape.h"

namespace gla_ext {

// Casts as autocast does. Autocast itself is off as long as this object lives.
template <c10::DeviceType device>
class Cast {
 public:
  at::Tensor operator()(const at::Tensor& t) const {
    return at::autocast::cached_cast(dtype_, t, device);
  }
  OptionalTensor operator()(const OptionalTensor& t) const {
    return at::autocast::cached_cast(dtype_, t, device);
  }
  template <bool casts, typename T>
  decltype(auto) where(T& argument) const {
    if constexpr (casts)
      return (*this)(argument);
    else
      return (argument);
  }

 private:
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{
      at::autocast::get_autocast_dispatch_key_from_device_type(device)};
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(device);
};

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
    const Cast<device> cast;
    return call(cast.template where<(place < count)>(args)...);
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
