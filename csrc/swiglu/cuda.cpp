// SwiGLU on CUDA: check, allocate, launch.
#include "cuda/host/launch.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

// Fresh outputs are aligned. If there are several rows, each row of an output is aligned if the
// width is.
bool is_aligned(const RowLayout& layout, int64_t elements) {
  bool aligned = layout.rows == 1 || layout.width % elements == 0;
  for (size_t i = 0; i < layout.tensors.size(); ++i)
    aligned &= starts_aligned(layout.tensors[i].const_data_ptr()) &&
               layout.strides[i].outer % elements == 0 && layout.strides[i].inner % elements == 0;
  return aligned;
}

class SwigluLaunch : Launch {
 public:
  SwigluLaunch(const char* op, const std::vector<at::Tensor>& inputs) : Launch(inputs[0].device()) {
    check_not_fp64(op, inputs[0].scalar_type());
    check_gpu(op, inputs[0].device());
    if (inputs[0].numel() == 0) return;
    layout_ = lay_out_elements(inputs);
    p = swiglu_problem<Swiglu>(layout_);
    p.dtype = dtype_of(inputs[0].scalar_type());
    p.aligned = is_aligned(layout_, 16 / inputs[0].element_size());
  }

  Swiglu p;

  void run(void (*kernel)(const Swiglu&, cudaStream_t)) const {
    if (!layout_.tensors.empty()) launch(kernel, p);
  }

 private:
  RowLayout layout_;
};

struct Backend {
  static void forward(const char* op, const std::vector<at::Tensor>& inputs, const at::Tensor& y) {
    SwigluLaunch launch(op, inputs);
    launch.p.y = y.mutable_data_ptr();
    launch.run(swiglu_forward);
  }

  static void backward(const char* op, const std::vector<at::Tensor>& inputs,
                       const at::Tensor& dgate, const at::Tensor& dup, const at::Tensor& y) {
    SwigluLaunch launch(op, inputs);
    launch.p.dgate = dgate.mutable_data_ptr();
    launch.p.dup = dup.mutable_data_ptr();
    if (y.numel() > 0) launch.p.y = y.mutable_data_ptr();
    launch.run(swiglu_backward);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) { SwigluOn<Backend>::register_in(m); }

}  // namespace gla_ext::cuda
