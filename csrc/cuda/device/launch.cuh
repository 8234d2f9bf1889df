// Chooses a kernel's instantiation and grid for a Problem.
#pragma once

#include <type_traits>

#include "cuda/host/launchers.h"
#include "gates.cuh"

namespace gla_ext::cuda {

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<bf16 | half | float>) for the dtype.
template <class F>
void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(Type<bf16>{});
    case DType::kHalf:
      return f(Type<half>{});
    case DType::kFloat:
      return f(Type<float>{});
  }
}

// Calls f(Type<bf16 | half | float>, Constant<Access>) for the dtype and the alignment of the rows.
template <Access kAccess>
using Constant = std::integral_constant<Access, kAccess>;

inline bool allows_fast_access(const Problem& p) {
  const DType intermediate = intermediate_dtype(p.dtype);
  const bool has_keys = p.q.data != nullptr || p.k.data != nullptr;
  if ((has_keys && p.K % 8 != 0) || p.V % 8 != 0 || p.A_diagonal.data != nullptr) return false;
  for (const Rows* r : {&p.q, &p.k, &p.v, &p.d_o, &p.b, &p.b_suffix, &p.o, &p.dq, &p.dk, &p.dv,
                        &p.A, &p.dA, &p.dq_intra, &p.dk_intra, &p.dg_intra})
    if (r->data != nullptr && !r->aligned) return false;
  return (p.A.data == nullptr || p.A.dtype == intermediate) &&
         (p.dA.data == nullptr || p.dA.dtype == intermediate) &&
         (p.S == nullptr || p.S_dtype == intermediate) &&
         (p.dS == nullptr || p.dS_dtype == intermediate);
}

template <class F>
void with_dtype_and_access(const Problem& p, F&& f) {
  with_dtype(p.dtype, [&](auto type) {
    if (allows_fast_access(p))
      f(type, Constant<Access::kFast>{});
    else
      f(type, Constant<Access::kGeneral>{});
  });
}

// Like with_dtype_and_access, for a call with gates on values, whose tensors are bf16 or fp32.
template <class F>
void with_gated_access(const Problem& p, const Problem& values, F&& f) {
  const bool fast = allows_fast_access(p) && allows_fast_access(values);
  const auto with = [&](auto type) {
    if (fast)
      f(type, Constant<Access::kFast>{});
    else
      f(type, Constant<Access::kGeneral>{});
  };
  if (p.dtype == DType::kBFloat16) return with(Type<bf16>{});
  with(Type<float>{});
}

// The number of chunks of all batch rows and heads.
inline int64_t chunk_heads(const Problem& p) {
  return p.grid.T == 0 ? 0 : p.grid.B * p.grid.entries * p.H;
}

// The number of blocks of a kernel for strong chunks, `parts` per chunk.
inline int64_t strong_grid(const Problem& p, int64_t parts) {
  return strong_blocks(chunk_heads(p)) * parts;
}

// A copy of the Problem in which a flag is set for the kernel.
inline Problem told(Problem p, bool Problem::* fact) {
  p.*fact = true;
  return p;
}

template <class Kernel>
void launch(Kernel kernel, int64_t blocks, int threads, const Problem& p, cudaStream_t stream) {
  if (blocks > 0) kernel<<<dim3(static_cast<unsigned>(blocks)), threads, 0, stream>>>(p);
}

template <class Kernel>
void launch(Kernel kernel, int64_t blocks, int threads, const Problem& p, const Problem& values,
            cudaStream_t stream) {
  if (blocks > 0) kernel<<<dim3(static_cast<unsigned>(blocks)), threads, 0, stream>>>(p, values);
}

// Calls f(Type<In>, Constant<Access>, integral_constant of the values of a tile). Tiles of 128
// values pay off only for bf16, whose tiles are half as large.
template <class F>
void with_value_tiles(const Problem& p, F&& f) {
  with_dtype_and_access(p, [&](auto type, auto access) {
    using In = typename decltype(type)::type;
    if constexpr (std::is_same_v<In, bf16> && decltype(access)::value == Access::kFast) {
      if (p.V > kTile) return f(type, access, std::integral_constant<int, 2 * kTile>{});
    }
    f(type, access, std::integral_constant<int, kTile>{});
  });
}

}  // namespace gla_ext::cuda
