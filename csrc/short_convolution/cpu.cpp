// The short convolution on CPU: check, allocate, run the tasks.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "common/tensors.h"
#include "cpu/host/call.h"
#include "cpu/host/pool_rows.h"
#include "cpu/kernel_tables.h"
#include "cpu_kernels.h"
#include "dispatch/checker.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

// The tokens of a task depend on the shape alone: dw is summed within a task, then over tasks in
// order.
constexpr int64_t kElementsPerTask = 32768, kMostRuns = 256;
constexpr int64_t kChannels = 1024;  // of a task; a multiple of what rows are padded to

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The places of sequences: rows of T tokens, or packed in one row.
class Sequences {
 public:
  Sequences(const char* op, const OptionalTensor& cu_seqlens, int64_t B, int64_t T) : B_(B), T_(T) {
    if (!given(cu_seqlens)) return;
    const at::Tensor cu = checked_offsets(op, *cu_seqlens, T);
    const int64_t* offsets = cu.const_data_ptr<int64_t>();
    bounds_.assign(offsets, offsets + cu.numel());
  }

  int64_t count() const { return bounds_.empty() ? B_ : static_cast<int64_t>(bounds_.size()) - 1; }
  int64_t tokens() const { return B_ * T_; }

  // The sequence that token `t` of batch row `row` is in.
  ConvolutionPiece around(int64_t row, int64_t t) const {
    ConvolutionPiece piece{row, row, 0, T_};
    if (bounds_.empty()) return piece;
    const auto next = std::upper_bound(bounds_.begin(), bounds_.end(), t);
    const bool tail = next == bounds_.end();
    piece.start = *(next - 1);  // offsets start with 0
    piece.end = tail ? T_ : *next;
    piece.n = tail ? -1 : next - bounds_.begin() - 1;
    return piece;
  }
  // Sequence n.
  ConvolutionPiece at(int64_t n) const {
    if (bounds_.empty()) return {n, n, 0, T_};
    return {0, n, bounds_[n], bounds_[n + 1]};
  }

  // Calls f(piece) for the pieces of tokens [first, end), counted over all batch rows.
  template <typename F>
  void for_pieces(int64_t first, int64_t end, F f) const {
    while (first < end) {
      const int64_t t = first % T_;
      ConvolutionPiece piece = around(first / T_, t);
      piece.from = t;
      piece.to = std::min(piece.end, t + end - first);
      first += piece.to - t;
      f(piece);
    }
  }

 private:
  int64_t B_, T_;
  std::vector<int64_t> bounds_;
};

TokenRows rows_of(const at::Tensor& t) {
  const TokenStrides strides = token_strides(t);
  return {const_cast<void*>(t.const_data_ptr()), strides.b, strides.t};
}

// The last W inputs of each sequence, bit for bit.
template <typename Element>
void copy_states(const Sequences& sequences, const at::Tensor& x, const OptionalTensor& cache,
                 at::Tensor& state) {
  const int64_t D = state.size(1), W = state.size(2);
  const TokenStrides strides = token_strides(x);
  const auto* from = static_cast<const Element*>(x.const_data_ptr());
  const auto* before =
      given(cache) ? static_cast<const Element*>(cache->const_data_ptr()) : nullptr;
  auto* to = static_cast<Element*>(state.mutable_data_ptr());
  at::parallel_for(0, sequences.count(), std::max<int64_t>(1, kElementsPerTask / (D * W + 1)),
                   [&](int64_t first, int64_t end) {
                     for (int64_t n = first; n < end; ++n) {
                       const ConvolutionPiece s = sequences.at(n);
                       for (int64_t i = 0; i < W; ++i) {
                         const int64_t t = s.end - W + i, in_cache = W + t - s.start;
                         const int64_t row = s.row * strides.b + t * strides.t;
                         for (int64_t d = 0; d < D; ++d)
                           to[(n * D + d) * W + i] = t >= s.start ? from[row + d]
                                                     : before != nullptr
                                                         ? before[(n * D + d) * W + in_cache]
                                                         : Element{};
                       }
                     }
                   });
}

template <typename F>
void with_element(const at::Tensor& t, F&& f) {
  if (t.element_size() == 8) return f(uint64_t{});
  if (t.element_size() == 4) return f(uint32_t{});
  f(uint16_t{});
}

// The gradient of cache entries that no token reads: the first input of a cache, or the whole cache
// if the sequence is empty; the state is then the whole cache.
template <typename Element>
void pass_empty_states(const Sequences& sequences, const OptionalTensor& dstate,
                       at::Tensor& dcache) {
  const int64_t D = dcache.size(1), W = dcache.size(2);
  const auto* from =
      given(dstate) ? static_cast<const Element*>(dstate->const_data_ptr()) : nullptr;
  auto* to = static_cast<Element*>(dcache.mutable_data_ptr());
  for (int64_t n = 0; n < sequences.count(); ++n) {
    const ConvolutionPiece s = sequences.at(n);
    const int64_t inputs = s.start == s.end ? W : 1;
    for (int64_t d = 0; d < D; ++d)
      for (int64_t i = 0; i < inputs; ++i) {
        const int64_t at = (n * D + d) * W + i;
        to[at] = from != nullptr && s.start == s.end ? from[at] : Element{};
      }
  }
}

// The kernels' side of a call. Holds the copies that they read.
template <typename T>
class ConvolutionTasks {
 public:
  ConvolutionTasks(const Sequences& sequences, const ConvolutionShape& shape, const at::Tensor& x,
                   const at::Tensor& weight, const OptionalTensor& bias)
      : sequences_(sequences), options_(x.options().dtype(shape.accumulate)) {
    p.D = x.size(2);
    p.W = weight.size(2);
    p.dtype = dtype_of(x.scalar_type());
    p.x = rows_of(x);
    weight_ = at::zeros({p.W, padded_width()}, options_);
    weight_.narrow(1, 0, p.D).copy_(weight.select(1, 0).t());
    bias_ = at::zeros({padded_width()}, options_);
    if (given(bias)) bias_.narrow(0, 0, p.D).copy_(*bias);
    p.weight = weight_.const_data_ptr<T>();
    p.bias = bias_.const_data_ptr<T>();
    run_tokens_ = std::max(divide_up(kElementsPerTask, std::min(p.D, kChannels)),
                           divide_up(sequences_.tokens(), kMostRuns));
  }

  Convolution<T> p;

  void forward() const { run(&ConvolutionKernels<T>::forward); }

  // Computes dw and dbias, [W + 1, padded D].
  at::Tensor backward() {
    const at::Tensor parts = at::zeros({runs(), p.W + 1, padded_width()}, options_);
    p.dweight_parts = parts.mutable_data_ptr<T>();
    run(&ConvolutionKernels<T>::backward);
    return sum_of_parts<T>(parts);
  }

 private:
  int64_t padded_width() const { return padded(p.D); }
  int64_t runs() const { return divide_up(sequences_.tokens(), run_tokens_); }
  void run(typename ConvolutionKernels<T>::Task ConvolutionKernels<T>::* task) const {
    const auto& kernels = KernelTables<ConvolutionKernels<T>>::in_use();
    const int64_t parts = divide_up(p.D, kChannels);
    const int64_t workspace = kernels.workspace_size(p.W, std::min(p.D, kChannels));
    for_each_task<T>(runs() * parts, workspace, [&](T* memory, int64_t i) {
      const int64_t run = i / parts, channel = i % parts * kChannels;
      const int64_t first = run * run_tokens_;
      const int64_t end = std::min(first + run_tokens_, sequences_.tokens());
      sequences_.for_pieces(first, end, [&](ConvolutionPiece piece) {
        piece.channel = channel;
        piece.width = std::min(kChannels, p.D - channel);
        piece.part = run;
        (kernels.*task)(p, memory, piece);
      });
    });
  }

  const Sequences& sequences_;
  at::TensorOptions options_;
  at::Tensor weight_, bias_;
  int64_t run_tokens_ = 1;
};

// Writes y, whose channels are contiguous. Returns the state, or nothing.
at::Tensor run_forward(const Sequences& sequences, const ConvolutionShape& shape,
                       const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& cache, const at::Tensor& y, bool output_state) {
  const at::Tensor inputs = with_contiguous_channels(x);
  const OptionalTensor before = contiguous(cache);
  at::Tensor state = output_state
                         ? at::empty({sequences.count(), x.size(2), weight.size(2)}, x.options())
                         : at::empty({0}, x.options());
  if (x.numel() > 0)
    with_accumulate(shape.accumulate, [&](auto type) {
      ConvolutionTasks<decltype(type)> tasks(sequences, shape, inputs, weight, bias);
      tasks.p.cache = data_of(before);
      tasks.p.y = rows_of(y);
      tasks.forward();
    });
  if (state.numel() > 0)
    with_element(
        x, [&](auto element) { copy_states<decltype(element)>(sequences, inputs, before, state); });
  return state;
}

ConvolutionForwardOutputs short_convolution_fwd_cpu(const ConvolutionForwardArguments& a) {
  const auto shape = check_short_convolution(a);
  const Sequences sequences("ShortConvolution", a.cu_seqlens, a.x.size(0), a.x.size(1));
  const at::Tensor y = contiguous_like(a.x);
  return {y, run_forward(sequences, shape, a.x, a.weight, a.bias, a.cache, y, a.output_state)};
}

// Copies the rows, as caches are small.
at::Tensor short_convolution_on_pool_cpu(const ConvolutionPoolArguments& a) {
  const auto shape = check_short_convolution(a);
  check_convolution_pool_layouts(a);
  const at::Tensor &x = a.x, &state = a.state;
  const Sequences sequences("short_convolution_", a.cu_seqlens, x.size(0), x.size(1));
  const int64_t N = sequences.count();
  const PoolRows rows(state, N, a.slots, a.write_slots, a.has_initial_state);
  at::Tensor cache = at::zeros({N, state.size(1), state.size(2)}, state.options());
  for (int64_t n = 0; n < N; ++n)
    if (rows.read[n] >= 0) cache.select(0, n).copy_(state.select(0, rows.read[n]));
  const at::Tensor y = a.out != nullptr ? *a.out : contiguous_like(x);
  const at::Tensor after = run_forward(sequences, shape, x, a.weight, a.bias, cache, y, true);
  int64_t end = 0;
  for (int64_t n = 0; n < N; ++n) {
    const ConvolutionPiece s = sequences.at(n);
    end = s.end;
    if (rows.slots[n] < 0)
      y.select(0, s.row).narrow(0, s.start, s.end - s.start).zero_();
    else if (rows.write[n] >= 0)
      state.select(0, rows.write[n]).copy_(after.select(0, n));
  }
  if (given(a.cu_seqlens)) y.narrow(1, end, x.size(1) - end).zero_();
  return y;
}

ConvolutionBackwardOutputs short_convolution_bwd_cpu(const ConvolutionBackwardArguments& a) {
  const auto shape = check_short_convolution(a);
  const at::Tensor &x = a.x, &weight = a.weight;
  const OptionalTensor &bias = a.bias, &cache = a.cache;
  const Sequences sequences("short_convolution_bwd", a.cu_seqlens, x.size(0), x.size(1));
  const at::Tensor inputs = with_contiguous_channels(x), grads = with_contiguous_channels(a.dy);
  const OptionalTensor before = contiguous(cache), of_state = contiguous(a.dstate);
  const auto not_asked_for = [&] { return at::empty({0}, x.options()); };
  at::Tensor dx = contiguous_like(x);
  at::Tensor dcache = given(cache) ? contiguous_like(*cache) : not_asked_for();
  at::Tensor dweight = at::zeros(weight.sizes(), weight.options());
  at::Tensor dbias = given(bias) ? at::zeros(bias->sizes(), bias->options()) : not_asked_for();
  if (dcache.numel() > 0)
    with_element(x, [&](auto element) {
      pass_empty_states<decltype(element)>(sequences, of_state, dcache);
    });
  if (x.numel() == 0) return {dx, dweight, dbias, dcache};
  const at::Tensor sums = with_accumulate(shape.accumulate, [&](auto type) {
    ConvolutionTasks<decltype(type)> tasks(sequences, shape, inputs, weight, bias);
    auto& p = tasks.p;
    p.cache = data_of(before);
    p.dstate = data_of(of_state);
    p.dcache = given(cache) ? dcache.mutable_data_ptr() : nullptr;
    p.dy = rows_of(grads);
    p.dx = rows_of(dx);
    return tasks.backward();
  });
  const int64_t D = x.size(2), W = weight.size(2);
  dweight.select(1, 0).copy_(sums.narrow(0, 0, W).narrow(1, 0, D).t());
  if (given(bias)) dbias.copy_(sums.select(0, W).narrow(0, 0, D));
  return {dx, dweight, dbias, dcache};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  register_short_convolution<short_convolution_fwd_cpu, short_convolution_bwd_cpu,
                             short_convolution_on_pool_cpu>(m);
}

}  // namespace gla_ext::cpu
