// The whole forward of a segment and head in one sweep, for bf16 on sm_90a. With
// q^ = scale q 2^(b - r) and k^ = k 2^(r - b) a chunk is ordinary linear attention,
//
//   A = tril(q^ k^T)      o = A v + q^ S~      S~ = 2^r S      S' = 2^(b_C - r) (S~ + k^T v)
//
// and the state stays in registers.
//
// grid    (segment, head, 128 values); two producer and two consumer warpgroups
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0 or segment_states
// writes  o [B, T, H, V], ht, tiers [B, slots, H, blocks]
//
// The producers copy the rows of a chunk into shared memory two chunks ahead, sum the gates and
// turn q and k into q^ and k^ in place. A consumer holds the state of 64 values transposed,
// [V][K], so that its bf16 form is an operand that never leaves the registers. Accumulation is
// fp32.
//
// A channel out of tier 1's range faces the state by q 2^b and k 2^(b_C - b), which are exact at
// any gate; its chunk's A is left out, tiers says so, and exact_output.cu adds it.
#include "../device/gates.cuh"
#include "../device/launch.cuh"
#include "cumsum.cuh"
#include "dynamic_shared.h"
#include "segment.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kStages = 3;
constexpr int kProducers = 2, kConsumers = 2;  // warpgroups
constexpr int kProducerThreads = kProducers * kGroupThreads;
constexpr int kConsumerThreads = kConsumers * kGroupThreads;
constexpr int kBlockThreads = kProducerThreads + kConsumerThreads;
constexpr int kProducerBarrier = 1, kScoresFreeBarrier = 2, kScoresBarrier = 3, kOutputBarrier = 4,
              kGatingBarrier = 6;

template <int K>
struct Stage {
  unsigned char q[K / 64 * kTileBytes];  // [token][K], then q^
  unsigned char k[K / 64 * kTileBytes];  // [token][K], then k^
  unsigned char g[K / 64 * kTileBytes];  // [token][K]
  unsigned char v[2 * kTileBytes];       // [token][V], then o
};

template <int K>
struct Shared {
  Stage<K> stages[kStages];
  unsigned char scores[kTileBytes];    // A [token][token]
  unsigned char triangle[kTileBytes];  // of ones, [token][token]
  // Factors of the state's key channels at a chunk: as it enters, from the last chunk's product to
  // 2^r S; before the product, 1 or 2^b_C; after the segment's last chunk.
  float entry[kStages][K], middle[kStages][K], leave[kStages][K];
  float b_last[K];       // log2 units
  float2 references[K];  // q^ = q 2^(b - x) and k^ = k 2^(x + y - b)
  uint64_t full[kStages], empty[kStages];
  int exact[kStages];
  Segment segment;
};

// Gates q and k of a chunk in place; a producer warpgroup has half of the key channels.
template <int K>
struct Gating {
  static constexpr int kColumns = K / kProducers;
  float before = 0;  // b_C - r of the chunk before, of channel `thread`
  int group, thread, first;

  __device__ __forceinline__ explicit Gating(int producer)
      : group(producer),
        thread(static_cast<int>(threadIdx.x) % kGroupThreads),
        first(producer * kColumns) {}

  __device__ __forceinline__ void group_barrier() const {
    if (group == 0)
      sync_threads<kGatingBarrier>(kGroupThreads);
    else
      sync_threads<kGatingBarrier + 1>(kGroupThreads);
  }

  // The references of this thread's channel and what they are to the state.
  __device__ __forceinline__ void set_channel(Shared<K>& s, int stage, int channel) {
    const float b_last = s.b_last[channel];
    const bool exact = !(fabsf(b_last) <= kTierRange);
    const float from = exact ? 0.f : reference_of(b_last), to = exact ? b_last : from;
    s.references[channel] = make_float2(from, to - from);
    s.entry[stage][channel] = exp2_ftz(before + from);
    s.middle[stage][channel] = exact ? exp2_ftz(b_last) : 1.f;
    before = exact ? 0.f : b_last - from;
    s.leave[stage][channel] = exp2_ftz(before);
    if (exact) s.exact[stage] = 1;
  }

  __device__ __forceinline__ void run(Shared<K>& s, int stage, float scale) {
    Stage<K>& tiles = s.stages[stage];
    const int tile = first / 64 * kTileBytes, column = first % 64;
    clamp_gates<kColumns>(tiles.g + tile, column);
    fence_for_products();
    group_barrier();  // the gates are clamped
    float b[kColumns / 2];
    sum_gates(b, s.triangle, tiles.g + tile, column);
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, t = lane % 4;
    if (row + 8 == kTile - 1) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        *reinterpret_cast<float2*>(&s.b_last[first + 8 * j + 2 * t]) =
            make_float2(kLog2E * b[4 * j + 2], kLog2E * b[4 * j + 3]);
    }
    group_barrier();  // s.b_last is written
    if (thread < kColumns) set_channel(s, stage, first + thread);
    group_barrier();  // s.references is written
    bool out = false;
    const auto gate = [&](uint32_t& q, uint32_t& k, float b0, float b1, const float4& r) {
      const float e0 = b0 * kLog2E - r.x, e1 = b1 * kLog2E - r.z;
      out |= !(fabsf(e0) <= kTierRange / 2) || !(fabsf(e1) <= kTierRange / 2);
      const float2 q_pair = unpack(q), k_pair = unpack(k);
      q = pack(q_pair.x * (scale * exp2_ftz(e0)), q_pair.y * (scale * exp2_ftz(e1)));
      k = pack(k_pair.x * exp2_ftz(r.y - e0), k_pair.y * exp2_ftz(r.w - e1));
    };
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const auto r = *reinterpret_cast<const float4*>(&s.references[first + 8 * j + 2 * t]);
      const int at = tile + swizzled(row, column / 8 + j) + 4 * t;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto* q = reinterpret_cast<uint32_t*>(tiles.q + at + e * 1024);
        auto* k = reinterpret_cast<uint32_t*>(tiles.k + at + e * 1024);
        uint32_t q_pair = *q, k_pair = *k;
        gate(q_pair, k_pair, b[4 * j + 2 * e], b[4 * j + 2 * e + 1], r);
        *q = q_pair;
        *k = k_pair;
      }
    }
    if (out) s.exact[stage] = 1;
  }
};

template <int K>
__device__ __forceinline__ void produce(Shared<K>& s, const Problem& p, const Segment& segment,
                                        int group, int first_v) {
  Gating<K> gating(group);
  using KeyCopier = RowCopier<K / 64, kProducerThreads>;
  KeyCopier g(p.g, segment, 0, p.K), q(p.q, segment, 0, p.K), k(p.k, segment, 0, p.K);
  RowCopier<2, kProducerThreads> v(p.v, segment, first_v, p.V);
  const auto copy = [&](int chunk) {
    if (chunk < segment.chunks) {
      const int stage = chunk % kStages, length = segment.length_of(chunk);
      if (chunk >= kStages) wait(&s.empty[stage], static_cast<uint32_t>(chunk / kStages - 1) & 1);
      Stage<K>& tiles = s.stages[stage];
      g.copy(tiles.g, length);
      q.copy(tiles.q, length);
      k.copy(tiles.k, length);
      v.copy(tiles.v, length);
    }
    commit_copies();
  };
  for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int stage = chunk % kStages;
    wait_for_copies<kStages - 2>();
    if (threadIdx.x == 0) s.exact[stage] = 0;
    sync_threads<kProducerBarrier>(kProducerThreads);  // the rows are there, s.exact is cleared
    gating.run(s, stage, p.scale);
    fence_for_products();
    arrive(&s.full[stage]);
    copy(chunk + kStages - 1);  // waits for the consumers, which are a chunk behind
  }
}

// A consumer's part of the state, [64 values][K].
template <int K>
struct State {
  float x[K / 2];

  // f(x, key, value)
  template <class F>
  __device__ __forceinline__ void for_elements(const Problem& p, int first_v, F&& f) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < K / 2; ++i) {
      const int v = first_v + row + i / 2 % 2 * 8, k = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      if (v < p.V && k < p.K) f(x[i], k, v);
    }
  }

  __device__ __forceinline__ void load(const Problem& p, const Segment& segment, int first_v) {
#pragma unroll
    for (int i = 0; i < K / 2; ++i) x[i] = 0;
    const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
    if (segment.first && p.h0 != nullptr) {
      const float* h0 = p.h0 + (segment.n * p.H + segment.head) * matrix;
      for_elements(p, first_v, [&](float& y, int k, int v) {
        y = h0[p.state_v_first ? v * p.K + k : k * p.V + v];
      });
    } else if (!segment.first) {
      const float* entering = p.segment_states + segment.slot * matrix;
      for_elements(p, first_v, [&](float& y, int k, int v) { y = entering[k * p.V + v]; });
    }
  }

  __device__ __forceinline__ void store(const Problem& p, const Segment& segment, int first_v) {
    if (!segment.last || p.ht == nullptr) return;
    float* ht = p.ht + (segment.n * p.H + segment.head) * static_cast<int64_t>(p.K) * p.V;
    for_elements(p, first_v, [&](float y, int k, int v) {
      ht[p.state_v_first ? v * p.K + k : k * p.V + v] = y;
    });
  }

  // By factors of the key channels.
  __device__ __forceinline__ void scale(const float* factors) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < K / 8; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * t);
      x[4 * j] *= f.x;
      x[4 * j + 1] *= f.y;
      x[4 * j + 2] *= f.x;
      x[4 * j + 3] *= f.y;
    }
  }
};

// Half of a chunk's scores, [64 tokens][32 tokens], to shared memory.
__device__ __forceinline__ void store_scores(unsigned char* scores, const float (&A)[16], int group,
                                             bool exact) {
  const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const int first = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = first + 8 * e, column = 32 * group + 8 * j + 2 * t;
      const float x0 = !exact && column <= row ? A[4 * j + 2 * e] : 0.f;
      const float x1 = !exact && column + 1 <= row ? A[4 * j + 2 * e + 1] : 0.f;
      *reinterpret_cast<uint32_t*>(scores + swizzled(row, column / 8) + 4 * t) = pack(x0, x1);
    }
}

// o^T [64 values][64 tokens] of a warpgroup by way of the tile of its v, so that whole rows are
// written.
__device__ __forceinline__ void store_output(unsigned char* tile, const float (&o)[32], int group,
                                             const Problem& p, const Segment& segment, int chunk,
                                             int first_v) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, lane = thread % 32;
  const auto group_barrier = [&] {
    if (group == 0)
      sync_threads<kOutputBarrier>(kGroupThreads);
    else
      sync_threads<kOutputBarrier + 1>(kGroupThreads);
  };
  group_barrier();  // v is read
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int token = 8 * j + lane % 8 + lane / 16 * 8, part = thread / 32 * 2 + lane / 8 % 2;
    store_transposed(shared_address(tile) + swizzled(token, part), pack(o[4 * j], o[4 * j + 1]),
                     pack(o[4 * j + 2], o[4 * j + 3]), pack(o[4 * j + 4], o[4 * j + 5]),
                     pack(o[4 * j + 6], o[4 * j + 7]));
  }
  group_barrier();  // o is written
  bf16* out = rows_at<bf16>(p.o, segment.row, segment.token_of(chunk), segment.head);
  const int length = segment.length_of(chunk);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = thread / 8 + 16 * i, part = thread % 8, column = first_v + 8 * part;
    if (token < length && column < p.V)
      *reinterpret_cast<uint4*>(out + token_offset(p.o, token) + column) =
          *reinterpret_cast<const uint4*>(tile + swizzled(token, part));
  }
}

template <int K>
__device__ __forceinline__ void consume(Shared<K>& s, const Problem& p, const Segment& segment,
                                        int group, int block_v) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  const int first_v = block_v + 64 * group;
  const bool writes_tiers = block_v == 0 && group == 0 && threadIdx.x % kGroupThreads == 0;
  State<K> state;
  state.load(p, segment, first_v);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int stage = chunk % kStages;
    Stage<K>& tiles = s.stages[stage];
    wait(&s.full[stage], static_cast<uint32_t>(chunk / kStages) & 1);
    const uint32_t q = shared_address(tiles.q), k = shared_address(tiles.k);
    const uint32_t v = shared_address(tiles.v) + group * kTileBytes;
    const bool exact = __any_sync(0xffffffffu, s.exact[stage]);

    state.scale(s.entry[stage]);
    uint32_t S_operand[K / 16][4];
#pragma unroll
    for (int i = 0; i < K / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S_operand[i][e] = pack(state.x[8 * i + 2 * e], state.x[8 * i + 2 * e + 1]);
    if (exact) state.scale(s.middle[stage]);
    float A[16];  // [64 tokens][32 tokens]
    float o[32];  // [64 values][64 tokens]
    begin_products();
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      const uint32_t step = i / 4 * kTileBytes + i % 4 * kStepBytes;
      product<kSummed, kSummed>(A, descriptor(q + step, 0), descriptor(k + group * 4096 + step, 0),
                                i > 0);
    }
    commit_products();
#pragma unroll
    for (int i = 0; i < K / 16; ++i)
      product(o, S_operand[i], descriptor(q + i / 4 * kTileBytes + i % 4 * kStepBytes, 0), i > 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<kOther, kOther>(state.x, descriptor(v + 2048 * i, kTileBytes),
                              descriptor(k + 2048 * i, kTileBytes));
    commit_products();

    wait_for_products<1>();
    sync_threads<kScoresFreeBarrier>(kConsumerThreads);  // the scores of the last chunk are read
    store_scores(s.scores, A, group, exact);
    fence_for_products();
    sync_threads<kScoresBarrier>(kConsumerThreads);  // s.scores is written
    begin_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<kOther, kSummed>(o, descriptor(v + 2048 * i, kTileBytes),
                               descriptor(shared_address(s.scores) + kStepBytes * i, 0));
    commit_products();
    wait_for_products<0>();
    if (chunk + 1 == segment.chunks) state.scale(s.leave[stage]);
    store_output(tiles.v + group * kTileBytes, o, group, p, segment, chunk, first_v);
    arrive(&s.empty[stage]);
    if (writes_tiers)
      *reinterpret_cast<uint64_t*>(p.tiers + segment.chunk_head(p, chunk) * kMaxTierBlocks) = exact;
  }
  state.store(p, segment, first_v);
}

template <int K>
__global__ void __launch_bounds__(kBlockThreads, 1) forward_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  Shared<K>& s = *reinterpret_cast<Shared<K>*>(s_bytes);
  const int v_blocks = blocks_of(p.V, kFusedValues);
  const int first_v = static_cast<int>(blockIdx.x % v_blocks) * kFusedValues;
  if (threadIdx.x == 0) {
    s.segment = find_segment(p, blockIdx.x / v_blocks);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&s.full[stage], kProducerThreads);
      init_barrier(&s.empty[stage], kConsumerThreads);
    }
  }
  fill_triangle<kBlockThreads>(s.triangle);
  fence_for_products();
  __syncthreads();  // the barriers, the segment and the triangle are there
  const Segment& segment = s.segment;
  if (segment.tail) {
    for (int chunk = 0; chunk < segment.chunks; ++chunk) {
      const Chunk tail{0,   segment.token_of(chunk), segment.length_of(chunk), segment.head, 0, 0,
                       true};
      write_zeros<kBlockThreads>(p.o, tail, first_v, min(first_v + kFusedValues, p.V));
    }
    return;
  }
  // One value a warp, so that the compiler knows the roles' branches not to diverge.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (group < kProducers) {
    give_registers<80>();
    produce<K>(s, p, segment, group, first_v);
  } else {
    take_registers<176>();
    consume<K>(s, p, segment, group - kProducers, first_v);
  }
#endif
}

template <int K>
void launch_forward(const Problem& p, cudaStream_t stream) {
  static const DynamicShared shared(forward_kernel<K>, sizeof(Shared<K>));
  const int64_t blocks = segment_heads(p.grid, p.H) * blocks_of(p.V, kFusedValues);
  if (blocks == 0) return;
  shared.allow();
  forward_kernel<K>
      <<<dim3(static_cast<unsigned>(blocks)), kBlockThreads, sizeof(Shared<K>), stream>>>(p);
}

}  // namespace

void forward(const Problem& p, cudaStream_t stream) {
  if (p.K <= 64)
    launch_forward<64>(p, stream);
  else
    launch_forward<128>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
