// Backward steps 1 and 4 to 7 of a chunk, and its A (forward step 3), in one kernel, for bf16 on
// sm_90a. For a key channel, with q^ = scale q 2^(b - from), k^ = k 2^(to - b) and k_out = k 2^(b_C
// - b):
//
//   A  = tril(q^ k^T)                        dv = A^T do + k_out dS'        dA = tril(do v^T)
//   x  = 2^from do S^T + dA k^               dq = scale 2^(b - from) x
//   y  = 2^(b_C - to) v dS'^T + dA^T q^      dk = 2^(to - b) y
//   dg_t = sum_(i >= t) [q^ x - k^ y]_i + sum_j k^_j 2^(b_C - to) (v dS'^T)_j + 2^b_C rowsum(S dS')
//
// In tier 1, from = to = r. A strong chunk has from = 0 and to = b_C, which is exact at any gate,
// and its dg uses q and k unrounded. Its A is an input, and dA's terms come as dq_intra, dk_intra
// and dg_intra.
//
// For K above 64, prepare.cu has made q^ and k^; there from and to follow from each channel's b_C,
// not from the chunk's tier. The states come scaled: S~ = 2^from S and dS~ = 2^(b_C - to) dS' (S
// and dS' in a channel out of range). Then k_out dS' is k^ dS~, and no accumulator is scaled.
//
// grid    (row, chunk, head); a warpgroup for each 64 key channels, four for K of 129 to 192
// reads   q, k, g [B, T, H, K], v, do [B, T, H, V], tiers, S, dS' [K, V] of the chunk; for strong
//         chunks dq_intra, dk_intra, dg_intra [B, T, H, K] and A [B, T, H, C]. For K above 64:
//         prepared chunks (A of strong ones only), states as tiles, q and k of strong chunks only
// writes  dq, dk, dg [B, T, H, K], dv [B, T, H, V]
// Accumulation, b and dg are fp32; 64 value channels at a time.
#include "chunk.cuh"
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"

namespace gla_ext::cuda::sm90 {
namespace gradients::chunk {

template <class Gate, int kTiles>
__global__ void __launch_bounds__(kGroupsFor<kTiles>* kGroupThreads, kBlocks<kTiles>)
    kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  Shared<kTiles>& s = *reinterpret_cast<Shared<kTiles>*>(s_bytes);
  const Chunk chunk = find_chunk(p, blockIdx.x);
  if (chunk.length == 0) return;
  if (chunk.tail) return clear_gradients<Gate, kTiles>(p, chunk);
  make_gradients<Gate>(s, p, chunk);
#endif
}

template <class Gate, int kTiles>
void launch(const Problem& p, cudaStream_t stream) {
  static_assert(fits_multiprocessor(kBlocks<kTiles>, sizeof(Shared<kTiles>)));
  static const DynamicShared shared(kernel<Gate, kTiles>, sizeof(Shared<kTiles>));
  const int64_t blocks = chunk_heads(p);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kernel<Gate, kTiles>, blocks, kGroupsFor<kTiles> * kGroupThreads,
                   sizeof(Shared<kTiles>), stream, p);
}

template <class Gate>
void launch(const Problem& p, cudaStream_t stream) {
  if (p.K <= kTile)
    launch<Gate, 1>(p, stream);
  else if (p.K <= 2 * kTile)
    launch<Gate, 2>(p, stream);
  else if (p.K <= 3 * kTile)
    launch<Gate, 3>(p, stream);
  else
    launch<Gate, 4>(p, stream);
}

}  // namespace gradients::chunk

void launch_gradients_chunk(const Problem& p, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    gradients::chunk::launch<float>(p, stream);
  else
    gradients::chunk::launch<bf16>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
