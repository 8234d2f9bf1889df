// The checks of one call. Each checks one fact; its message is a sentence with what was expected
// and what came. Sizes are symbolic, so no code branches on them.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "common/shape.h"

namespace gla_ext {

using Sizes = std::vector<c10::SymInt>;

// Absent tensors are null.
using NamedTensor = std::pair<const char*, const at::Tensor*>;
using NamedTensors = std::vector<NamedTensor>;
inline const at::Tensor* where_given(const OptionalTensor& t) { return given(t) ? &*t : nullptr; }

// Calls f(name, tensor) for each tensor that is not null.
template <typename F>
void for_each_given(const NamedTensors& tensors, const F& f) {
  for (const auto& [name, t] : tensors)
    if (t != nullptr) f(name, *t);
}

std::string dtype_name(at::ScalarType t);

void check_defined(const char* op, const char* name, const at::Tensor& t);

// The default scale, K^-0.5, unless one is given.
double resolve_scale(std::optional<double> scale, int64_t K);

// The offsets as contiguous int64, for CPU, where reading them costs nothing. Raises unless the
// first is 0, none is less than the one before it, and the last is at most T.
at::Tensor checked_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t T);

inline bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

// [rows, H, K, V], or [rows, H, V, K] if v_first.
inline Sizes states(const Shape& s, const c10::SymInt& rows, bool v_first) {
  return {rows, s.H, v_first ? s.V : s.K, v_first ? s.K : s.V};
}

// Keeps the operator's name, for messages, and the device and dtype of the first tensor, with which
// the others must agree.
class Checker {
 public:
  Checker(const char* op, const char* first_name, const at::Tensor& first)
      : op_(op), first_name_(first_name) {
    defined(first_name, first);
    device_ = first.device();
    dtype_ = first.scalar_type();
  }

  void defined(const char* name, const at::Tensor& t) const { check_defined(op_, name, t); }

  void strided(const char* name, const at::Tensor& t) const {
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, op_, ": expected ", name,
                                " to be a strided (dense) tensor, got layout ", t.layout());
  }

  void device(const char* name, const at::Tensor& t) const {
    TORCH_CHECK_VALUE(t.device() == device_, op_, ": expected ", name, " on the device of ",
                      first_name_, ", ", device_, ", got ", t.device());
  }

  void dtype(const char* name, const at::Tensor& t, at::ScalarType expected,
             const char* why) const {
    TORCH_CHECK_TYPE(t.scalar_type() == expected, op_, ": expected ", name, " to be ",
                     dtype_name(expected), why, ", got ", dtype_name(t.scalar_type()));
  }

  void floating(const char* name, const at::Tensor& t) const {
    const auto s = t.scalar_type();
    TORCH_CHECK_TYPE(s == at::kBFloat16 || s == at::kHalf || s == at::kFloat || s == at::kDouble,
                     op_, ": expected ", name,
                     " to be torch.bfloat16, torch.float16, torch.float32 or torch.float64, got ",
                     dtype_name(s));
  }

  // Checks for the dtype of the first tensor.
  void like_first(const char* name, const at::Tensor& t, at::ScalarType expected) const {
    dtype(name, t, expected, c10::str(" like ", first_name_).c_str());
  }

  // Checks that a tensor is given, strided and on the device of the first tensor.
  void placed(const char* name, const at::Tensor& t) const {
    defined(name, t);
    strided(name, t);
    device(name, t);
  }
  void placed(const NamedTensors& tensors, const NamedTensors& others = {}) const;

  // Checks that it is `placed` and has the dtype of the first tensor.
  void like(const char* name, const at::Tensor& t) const {
    placed(name, t);
    like_first(name, t, dtype_);
  }

  // Checks that all are `placed`. `tensors` must have the dtype of their first; `others` may have
  // any floating dtype.
  void alike(const NamedTensors& tensors, const NamedTensors& others = {}) const;

  // For gates and pools of states. If inputs are fp32, fp16 or bf16, they may be any of these
  // three; if inputs are fp64, they must be fp64.
  void gate_dtype(const char* name, const at::Tensor& t, bool fp64) const {
    const auto s = t.scalar_type();
    if (fp64) return like_first(name, t, at::kDouble);
    TORCH_CHECK_TYPE(s == at::kBFloat16 || s == at::kHalf || s == at::kFloat, op_, ": expected ",
                     name, " to be torch.bfloat16, torch.float16 or torch.float32, got ",
                     dtype_name(s));
  }

  // A gate for each key channel, or one per head.
  void key_gate(const char* name, const at::Tensor& t, const Sizes& keys) const {
    TORCH_CHECK_VALUE(t.dim() == 3 || t.dim() == 4, op_, ": expected ", name,
                      " to have 4 dimensions [B, T, HK, K], or 3 dimensions [B, T, HK], got ",
                      t.dim(), " with shape ", t.sym_sizes());
    if (t.dim() == 4) return shape(name, t, "[B, T, HK, K]", keys);
    shape(name, t, "[B, T, HK]", {keys[0], keys[1], keys[2]});
  }

  void rank(const char* name, const at::Tensor& t, int64_t rank, const char* dims) const {
    TORCH_CHECK_VALUE(t.dim() == rank, op_, ": expected ", name, " to have ", rank, " dimension",
                      rank == 1 ? "" : "s", " ", dims, ", got ", t.dim(), " with shape ",
                      t.sym_sizes());
  }

  void shape(const char* name, const at::Tensor& t, const char* dims, const Sizes& expected) const {
    rank(name, t, static_cast<int64_t>(expected.size()), dims);
    for (size_t i = 0; i < expected.size(); ++i)
      TORCH_CHECK_VALUE(holds(t.sym_size(static_cast<int64_t>(i)).sym_eq(expected[i])), op_,
                        ": expected ", name, " to have shape ", dims, " = ",
                        c10::SymIntArrayRef(expected), ", got ", t.sym_sizes());
  }

  void shapes(const NamedTensors& tensors, const char* dims, const Sizes& expected) const {
    for_each_given(tensors,
                   [&](const char* name, const at::Tensor& t) { shape(name, t, dims, expected); });
  }

  // k, v and gates may have fewer heads than q. Each of these is then shared by the same number of
  // q's heads.
  void divides_heads(const c10::SymInt& HK, const c10::SymInt& H) const {
    const c10::SymBool divides = HK.sym_ge(1).sym_and((H % HK.max(1)).sym_eq(0));
    TORCH_CHECK_VALUE(holds(divides.sym_or(HK.sym_eq(H))), op_,
                      ": expected HK, the heads of k, to divide H = ", H, ", got ", HK);
  }

  void at_least_one(const char* what, const char* name, const c10::SymInt& size) const {
    TORCH_CHECK_VALUE(holds(size.sym_ge(1)), op_, ": expected ", what, " of ", name,
                      " to be at least 1, got ", size);
  }

  // Checks for int32 or int64 and one dimension.
  void indices(const char* name, const at::Tensor& t, const char* dims) const {
    placed(name, t);
    TORCH_CHECK_TYPE(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, op_,
                     ": expected ", name, " to be torch.int32 or torch.int64, got ",
                     dtype_name(t.scalar_type()));
    rank(name, t, 1, dims);
  }

  // Checks the indices of N sequences, one each, if they are given.
  void indices_of(const char* name, const OptionalTensor& t, const char* dims,
                  const c10::SymInt& N) const {
    if (!given(t)) return;
    indices(name, *t, dims);
    shape(name, *t, dims, {N});
  }

  // Checks the flags, if given, that tell for each of N sequences whether it continues from its row
  // of a pool.
  void has_initial_state(const OptionalTensor& t, const char* dims, const c10::SymInt& N) const {
    const char* name = "has_initial_state";
    if (!given(t)) return;
    placed(name, *t);
    dtype(name, *t, at::kBool, "");
    shape(name, *t, dims, {N});
  }

  // Checks cu_seqlens, whose length gives N.
  void offsets(const OptionalTensor& cu_seqlens, Shape& shape) const {
    shape.packed = given(cu_seqlens);
    if (!shape.packed) {
      shape.N = shape.B;
      shape.chunks = (shape.T + kChunk - 1) / kChunk;
      return;
    }
    const at::Tensor& cu = *cu_seqlens;
    indices("cu_seqlens", cu, "[N + 1]");
    TORCH_CHECK_VALUE(holds(cu.sym_size(0).sym_ge(1)), op_,
                      ": expected cu_seqlens to have at least 1 element (N + 1 offsets), got ",
                      cu.sym_size(0));
    TORCH_CHECK_VALUE(holds(shape.B.sym_eq(1)), op_,
                      ": expected batch size 1 with cu_seqlens (sequences packed in one row), got ",
                      shape.B);
    shape.N = cu.sym_size(0) - 1;
    shape.chunks = shape.T / kChunk + shape.N;
  }

  void state(const char* name, const OptionalTensor& t, const Shape& shape, bool v_first) const {
    if (!given(t)) return;
    placed(name, *t);
    dtype(name, *t, shape.accumulate, "");
    this->shape(name, *t, v_first ? "[N, H, V, K]" : "[N, H, K, V]",
                states(shape, shape.N, v_first));
  }

  // A pool of states. Its dtype may differ from the inputs', see gate_dtype.
  void pool(const char* name, const at::Tensor& t, const Shape& shape, const c10::SymInt& rows,
            const char* dims, bool v_first) const {
    placed(name, t);
    gate_dtype(name, t, shape.accumulate == at::kDouble);
    this->shape(name, t, dims, states(shape, rows, v_first));
  }

 private:
  const char *op_, *first_name_;
  at::Device device_ = at::kCPU;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace gla_ext
