// The linear maps of a decoded token on CUDA: check, allocate, launch. Calls that the kernel does
// not serve are composed of other operators.
#include <torch/library.h>

#include "cuda/host/launch.h"
#include "cuda/host/plan_inputs.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

class DecodeCall : Launch {
 public:
  // x has D columns: the product of its last `last` dimensions.
  DecodeCall(const char* op, const at::Tensor& x, int64_t last, bool overlaps)
      : Launch(x.device()) {
    check_gpu(op, x.device());
    sizes_ = x.sizes().vec();
    int64_t D = 1;
    for (; last > 0; --last) D *= sizes_.back(), sizes_.pop_back();
    const int64_t rows = x.numel() / D;
    const bool dtype = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
    serves_ = dtype && rows >= 1 && rows <= kMostDecodeRows && D % kDecodeStep == 0 &&
              D <= kMostDecodeColumns;
    if (!serves_) return;
    p.dtype = dtype_of(x.scalar_type());
    p.rows = static_cast<int32_t>(rows), p.D = static_cast<int32_t>(D);
    p.group = p.D;
    p.overlaps = overlaps && takes_dependent_launch(x.device());
    p.processors = at::cuda::getDeviceProperties(x.device().index())->multiProcessorCount;
    p.clusters = takes_sm90(x.device());
    p.x = input(x, D, p.x_stride);
  }

  DecodeLinear p;

  // The norm of each row, or of each head; there may be one head.
  void norm(const OptionalTensor& weight, double eps, int64_t group, Before before) {
    serves_ = serves_ && group % kDecodeStep == 0;
    if (!serves_) return;
    p.group = static_cast<int32_t>(group);
    before_ = before;
    p.eps = static_cast<float>(eps), p.per_group = 1.f / static_cast<float>(group);
    if (!given(weight)) return;
    serves_ = weight->scalar_type() != at::kDouble;
    if (!serves_) return;
    p.norm_dtype = dtype_of(weight->scalar_type());
    p.overlaps = p.overlaps && weight->is_contiguous();
    p.norm_weight = hold(weight->contiguous()).const_data_ptr();
  }
  void gate(const at::Tensor& t) {
    if (serves_) p.gate = input(t, p.D, p.gate_stride);
  }
  void residual(const at::Tensor& t) {
    if (serves_) p.residual = input(t, t.size(-1), p.residual_stride);
  }
  void up(const at::Tensor& t) {
    if (serves_) p.up = weight(t);
  }
  // Whether the kernel serves this call, which has so many maps.
  bool serves(size_t maps) const {
    return serves_ && maps <= kMostMaps && decode_linear_bytes(p, before_) <= kMostDecodeBytes;
  }
  // Adds a map. Returns its output, [..., width].
  at::Tensor map(const at::Tensor& t, int64_t tile_rows) {
    LinearMap& m = p.maps[p.count++];
    m.weight = weight(t);
    m.width = static_cast<int32_t>(t.size(0));
    m.first_tile = p.tiles;
    p.tiles += static_cast<int32_t>((t.size(0) + tile_rows - 1) / tile_rows);
    auto sizes = sizes_;
    sizes.push_back(t.size(0));
    at::Tensor y = at::empty(sizes, t.options());
    m.y = y.mutable_data_ptr();
    return y;
  }
  void run(void (*kernel)(const DecodeLinear&, cudaStream_t)) const { launch(kernel, p); }

 private:
  // t as contiguous rows [rows, width], each of which starts at a multiple of 16 bytes. A tensor of
  // another layout is copied; this holds for the copy if width is a multiple of 8.
  const void* input(const at::Tensor& t, int64_t width, int32_t& stride) {
    const at::Tensor m = t.reshape({p.rows, width});
    const bool fits = (m.stride(1) == 1 || width == 1) && starts_aligned(m.const_data_ptr()) &&
                      m.stride(0) % 8 == 0 && m.stride(0) <= kMostDecodeColumns;
    const at::Tensor& c = hold(fits ? m : aligned(m));
    stride = static_cast<int32_t>(c.stride(0));
    return c.const_data_ptr();
  }
  // The kernel may read weights before the previous kernel has ended, which therefore must not be
  // the one that copies them.
  const void* weight(const at::Tensor& t) {
    const bool fits = t.is_contiguous() && starts_aligned(t.const_data_ptr());
    p.overlaps = p.overlaps && fits;
    return hold(fits ? t : aligned(t)).const_data_ptr();
  }
  static at::Tensor aligned(const at::Tensor& t) { return t.clone(at::MemoryFormat::Contiguous); }

  std::vector<int64_t> sizes_;  // of an output, without its last
  bool serves_ = false;
  Before before_ = Before::kNothing;
};

struct Backend {
  static std::vector<at::Tensor> run(const NormLinear& a) {
    DecodeCall call("norm_linear", a.x, 1, a.overlaps);
    call.norm(a.norm_weight, a.eps, a.x.size(-1), Before::kNorm);
    if (!call.serves(a.weights.size())) return composed(a);
    std::vector<at::Tensor> results;
    for (const at::Tensor& weight : a.weights) results.push_back(call.map(weight, 16));
    call.run(decode_norm_linear);
    return results;
  }

  static at::Tensor run(const NormSwiglu& a) {
    DecodeCall call("norm_swiglu", a.x, 1, a.overlaps);
    call.norm(a.norm_weight, a.eps, a.x.size(-1), Before::kNorm);
    if (!call.serves(1)) return composed(a);
    at::Tensor y = call.map(a.gate_weight, 8);
    call.up(a.up_weight);
    call.run(decode_norm_swiglu);
    return y;
  }

  static at::Tensor run(const LinearResidual& a) {
    DecodeCall call("linear_residual", a.x, 1, a.overlaps);
    if (!call.serves(1)) return composed(a);
    at::Tensor y = call.map(a.weight, 16);
    call.residual(a.residual);
    call.run(decode_linear_residual);
    return y;
  }

  static at::Tensor run(const NormGateLinearResidual& a) {
    DecodeCall call("norm_gate_linear_residual", a.o, 2, a.overlaps);
    call.norm(a.norm_weight, a.eps, a.o.size(-1), Before::kGatedNorm);
    if (!call.serves(1)) return composed(a);
    at::Tensor y = call.map(a.weight, 16);
    call.gate(a.gate);
    call.residual(a.residual);
    call.run(decode_norm_gate_linear_residual);
    return y;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) { register_decode<Backend>(m); }

}  // namespace gla_ext::cuda
