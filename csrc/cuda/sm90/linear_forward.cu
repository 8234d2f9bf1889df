// The forward of a segment and head in one sweep over ready operands, for bf16 on sm_90a: what the
// consumers of forward.cu do, for up to 256 key channels.
//
//   o = A v + q^ S~      S~ = 2^from S      S' = 2^(b_C - from) (S~ + k^T v)
//
// grid    (segment, head, 128 values); a producer and two consumer warpgroups
// reads   operands [B, slots, H], v [B, T, H, V], h0 or segment_states
// writes  o [B, T, H, V], ht
//
// The producer copies a chunk's operands in one piece, and rows of v. A consumer holds the state of
// 64 values transposed, [V][K], 128 key channels a part. Accumulation is fp32. What chunks outside
// tier 1 owe to their own A is left to exact_output.cu.
#include "../device/launch.cuh"
#include "dynamic_shared.h"
#include "forward/output.cuh"
#include "forward/state.cuh"
#include "linear_sweep.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kValues = kLinearConsumers * kTile;  // of a block
// Of a thread: more than a block is launched with would wait for ever.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert((kProducerRegisters + kLinearConsumers * kConsumerRegisters) * kGroupThreads <=
              65536 / kLinearThreads / 8 * 8 * kLinearThreads);

template <int kGroups>
struct Stage {
  Operands<kGroups> operands;
  unsigned char v[kLinearConsumers * kTileBytes];  // [token][V], then o
};
template <int kGroups>
using Block = LinearBlock<Stage<kGroups>, kGroups == 1 ? 3 : 2>;

template <int kGroups>
__device__ __forceinline__ void produce(Block<kGroups>& s, const Problem& p, int first_v) {
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x);
  RowCopier<kLinearConsumers, kGroupThreads> v(p.v, token_offset(p.v, 1), segment, 0, thread,
                                               first_v, p.V);
  const unsigned char* operands = operands_at(p, segment.chunk_head(p, 0));
  s.produce([&](int i, Stage<kGroups>& stage, uint64_t* full) {
    if (thread == 0) bulk_copy(&stage.operands, operands, Operands<kGroups>::kBytes, full);
    operands += p.H * operand_bytes(p.K);
    v.copy(stage.v, segment.length_of(i));
    v.move(1);
  });
}

template <int kGroups>
__device__ __forceinline__ void consume(Block<kGroups>& s, const Problem& p, int group,
                                        int block_v) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  const Segment& segment = s.segment;
  const int first_v = block_v + kTile * group;
  if (segment.tail) return write_tail(p, segment, first_v);
  State<kOperandKeys> state[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    state[i].first_k = i * kOperandKeys;
    state[i].load(p, segment, first_v);
  }
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int number = chunk % s.kStages;
    auto& stage = s.stages[number];
    const uint32_t v = shared_address(stage.v) + group * kTileBytes;
    wait(&s.full[number], s.parity(chunk));
    const bool exact = __any_sync(0xffffffffu, stage.operands.exact);
    float o[32];  // [64 values][64 tokens]
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const auto& operands = stage.operands.groups[i];
      state[i].scale(operands.factors[kEnter]);
      uint32_t S_operand[kOperandKeys / 16][4];
#pragma unroll
      for (int j = 0; j < kOperandKeys / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          S_operand[j][e] = pack(state[i].x[8 * j + 2 * e], state[i].x[8 * j + 2 * e + 1]);
      if (exact) state[i].scale(operands.factors[kMiddle]);
      const uint32_t q = shared_address(operands.q);
      begin_products();
#pragma unroll
      for (int j = 0; j < kOperandKeys / 16; ++j)
        product(o, S_operand[j], descriptor(q + j / 4 * kTileBytes + j % 4 * kStepBytes, 0),
                i + j > 0);
      commit_products();
      if (i + 1 < kGroups) wait_for_products<0>();  // the registers of S_operand are free
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      product<kOther, kSummed>(o, descriptor(v + 2048 * j, kTileBytes),
                               descriptor(shared_address(stage.operands.A) + kStepBytes * j, 0));
    commit_products();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t k = shared_address(stage.operands.groups[i].k);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        product<kOther, kOther>(state[i].x, descriptor(v + 2048 * j, kTileBytes),
                                descriptor(k + 2048 * j, kTileBytes));
    }
    commit_products();
    wait_for_products<0>();
    // Before store_output: its loads, which its stores wait for, come behind these. A load still
    // queued at `arrive` would find the stage refilled.
#pragma unroll
    for (int i = 0; i < kGroups; ++i) state[i].scale(stage.operands.groups[i].factors[kLeave]);
    store_output(stage.v + group * kTileBytes, o, group, p, segment, chunk, first_v);
    arrive(&s.empty[number]);
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) state[i].store(p, segment, first_v);
}

template <int kGroups>
__global__ void __launch_bounds__(kLinearThreads, 1) linear_forward_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Block<kGroups>*>(s_bytes);
  const int v_blocks = blocks_of(p.V, kValues);
  const int block_v = static_cast<int>(blockIdx.x % v_blocks) * kValues;
  s.start(p, blockIdx.x / v_blocks);
  const int group = warpgroup();
  if (group == 0) {
    give_registers<kProducerRegisters>();
    if (!s.segment.tail) produce<kGroups>(s, p, block_v);
  } else {
    take_registers<kConsumerRegisters>();
    consume<kGroups>(s, p, group - 1, block_v);
  }
#endif
}

template <int kGroups>
void launch_linear_forward(const Problem& p, cudaStream_t stream) {
  static const DynamicShared shared(linear_forward_kernel<kGroups>, sizeof(Block<kGroups>));
  const int64_t blocks = segment_heads(p.grid, p.H) * blocks_of(p.V, kValues);
  if (blocks == 0) return;
  shared.allow();
  linear_forward_kernel<kGroups>
      <<<dim3(static_cast<unsigned>(blocks)), kLinearThreads, sizeof(Block<kGroups>), stream>>>(p);
}

}  // namespace

void linear_forward(const Problem& p, cudaStream_t stream) {
  if (p.K > kOperandKeys)
    launch_linear_forward<2>(p, stream);
  else
    launch_linear_forward<1>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
