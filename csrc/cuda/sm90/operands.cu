// What of a chunk does not need the state, for sweeps that gate nothing: of its key channels
//
//   q^ = scale q 2^(b - from)      k^ = k 2^(to - b)      A = tril(q^ k^T)
//
// and the factors that a state is multiplied by. In tier 1's range from = to = r; a channel out of
// it has from = 0 and to = b_C, exact at any gate against the state. Its chunk's A is that of
// forward steps 3 and 4 outside tier 1, and in backward steps 5 and 6 are done here too.
//
// grid    (row, chunk, head); two warpgroups, 128 key channels at a time
// reads   q, k, g [B, T, H, K]; outside tier 1 in backward v, do [B, T, H, V]
// writes  operands [B, slots, H], tiers [B, slots, H, blocks]; A of chunks in tier 1 only where a
//         sweep reads it; outside tier 1 in backward dq_intra, dk_intra, dg_intra [B, T, H, K] fp32
//
// b and the accumulation of A are fp32; dA of chunks outside tier 1 is bf16, in shared memory.
#include "../device/launch.cuh"
#include "dependent_launch.cuh"
#include "dynamic_shared.h"
#include "exact_intra.cuh"
#include "operands.cuh"
#include "products.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kThreadsOfBlock = kKeyTiles * kGroupThreads;
static_assert(kThreadsOfBlock == kThreads, "chunks outside tier 1 take as many");

struct Tiles {
  OperandGroup group;
  unsigned char A[kTileBytes];
  float gates[kParts][kOperandKeys];  // sums of a part of the tokens
};

union Shared {
  Tiles tiles;
  ExactChunk exact;  // outside tier 1, once the tiles are read
};
static_assert(sizeof(Shared) == sizeof(Tiles), "chunks outside tier 1 take no more");

// q^, k^ and the factors of 128 key channels from `first` on. Whether a channel is out of range.
template <class Gate>
__device__ __forceinline__ bool gate_group(Tiles& s, const Problem& p, const Chunk& chunk,
                                           int first) {
  const Pair<kKeyTiles> pair;
  const int channel = first + pair.channel;
  const PairColumn<Gate> gates(p.g, p, chunk, pair.first, channel);
  const PairColumn<bf16> q(p.q, p, chunk, pair.first, channel);
  const PairColumn<bf16> k(p.k, p, chunk, pair.first, channel);
  sum_gates(s.gates, gates, pair);
  __syncthreads();  // s.gates is written
  auto [b, last] = cumsum(s.gates, pair);
  const bool exact_x = !(fabsf(last.x) <= kTierRange), exact_y = !(fabsf(last.y) <= kTierRange);
  const References rx(last.x, exact_x), ry(last.y, exact_y);
  if (pair.part == 0) {
    auto& factors = s.group.factors;
    pair_at(factors[kEnter], pair.channel) = make_float2(exp2_ftz(rx.from), exp2_ftz(ry.from));
    pair_at(factors[kMiddle], pair.channel) =
        make_float2(exact_x ? exp2_ftz(last.x) : 1.f, exact_y ? exp2_ftz(last.y) : 1.f);
    pair_at(factors[kLeave], pair.channel) = make_float2(exact_x ? 1.f : exp2_ftz(last.x - rx.to),
                                                         exact_y ? 1.f : exp2_ftz(last.y - ry.to));
    pair_at(factors[kSum], pair.channel) = last;
  }
  bool out = false;
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) {
    b = b + to_log2(gates[i]);
    out |= out_of_tier1(b.x, last.x) || out_of_tier1(b.y, last.y);
    const int at = pair.offset(pair.first + i);
    const float2 q_pair = unpack(q.x[i]), k_pair = unpack(k.x[i]);
    word(s.group.q, at) = pack(q_pair.x * p.scale * exp2_ftz(b.x - rx.from),
                               q_pair.y * p.scale * exp2_ftz(b.y - ry.from));
    word(s.group.k, at) = pack(k_pair.x * exp2_ftz(rx.to - b.x), k_pair.y * exp2_ftz(ry.to - b.y));
  }
  return out;
}

template <class Gate>
__global__ void __launch_bounds__(kThreadsOfBlock, 2) operands_kernel(Problem p, bool scores) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  constexpr auto kSummed = Contiguous::kSummed;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(s_bytes);
  Tiles& s = shared.tiles;
  const Chunk chunk = find_chunk(p, blockIdx.x);
  if (chunk.length == 0 || chunk.tail) return;
  unsigned char* out = operands_at(p, chunk.slot);
  float A[32 / kKeyTiles];
  clear(A);
  bool exact = false;
#pragma unroll 1
  for (int first = 0; first < p.K; first += kOperandKeys, out += sizeof(OperandGroup)) {
    exact |= gate_group<Gate>(s, p, chunk, first);
    fence_for_products();  // and bulk stores
    __syncthreads();       // q^, k^ and the factors are written, s.gates is read
    if (threadIdx.x == 0) {
      bulk_store(out, &s.group, sizeof(OperandGroup));
      commit_bulk_stores();
    }
    if (scores) {
      const Place at;
      begin_products();
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
        multiply<kSummed, kSummed>(
            A, shared_address(s.group.q) + i * kTileBytes,
            shared_address(s.group.k) + i * kTileBytes + at.group * (kTile / kKeyTiles) * 128);
      commit_products();
      wait_for_products<0>();
    }
    if (threadIdx.x == 0) wait_for_bulk_stores();
    __syncthreads();  // the group is read
  }
  exact = __syncthreads_or(exact);
  if (threadIdx.x == 0) {
    *reinterpret_cast<uint64_t*>(p.tiers + chunk.slot * kMaxTierBlocks) = exact;
    if (scores)  // 16 bytes are copied, and so all are written
      *reinterpret_cast<int4*>(out + kTileBytes) = make_int4(exact, 0, 0, 0);
  }
  if (exact) return shared.exact.finish(p, [&] { return find_chunk(p, block_index()); });
  if (!scores) return;
  store_scores(s.A, A);
  fence_for_products();
  __syncthreads();  // A is written
  if (threadIdx.x == 0) {
    bulk_store(out, s.A, kTileBytes);
    commit_bulk_stores();
    wait_for_bulk_stores();
  }
#endif
}

template <class Gate>
void launch_operands(const Problem& p, cudaStream_t stream) {
  static const DynamicShared shared(operands_kernel<Gate>, sizeof(Shared));
  const int64_t blocks = chunk_heads(p);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(operands_kernel<Gate>, blocks, kThreadsOfBlock, sizeof(Shared), stream, p,
                   p.o.data != nullptr || p.swept_gradients);
}

}  // namespace

void operands(const Problem& p, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    launch_operands<float>(p, stream);
  else
    launch_operands<bf16>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
