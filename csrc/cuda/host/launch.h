// A call of an operator's kernels, on the device and the current stream of its tensors.
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>
#include <vector>

#include "tensors.h"

namespace gla_ext::cuda {

// The base of an operator's class of calls. Holds the copies that some inputs need.
class Launch {
 protected:
  explicit Launch(at::Device device)
      : guard_(device), stream_(c10::cuda::getCurrentCUDAStream(device.index())) {}

  // The result is valid until the next call.
  const at::Tensor& hold(at::Tensor t) { return held_.emplace_back(std::move(t)); }
  const at::Tensor& contiguous(const at::Tensor& t) {
    return t.is_contiguous() ? t : hold(t.contiguous());
  }
  int multiprocessors() const { return multiprocessors_of(stream_.device()); }

  template <typename Kernel, typename... Args>
  void launch(const Kernel& kernel, Args&&... args) const {
    kernel(std::forward<Args>(args)..., stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  c10::cuda::CUDAStream stream() const { return stream_; }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  std::vector<at::Tensor> held_;
};

}  // namespace gla_ext::cuda
