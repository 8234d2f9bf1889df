// The whole forward of a segment and head in one sweep, for bf16 on sm_90a. With
// q^ = scale q 2^(b - r) and k^ = k 2^(r - b) a chunk is ordinary linear attention,
//
//   A = tril(q^ k^T)      o = A v + q^ S~      S~ = 2^r S      S' = 2^(b_C - r) (S~ + k^T v)
//
// and the state stays in registers.
//
// grid    (segment, head, 128 values); two producer and two consumer warpgroups. Where K and V are
//         at most 64, two segments and heads a block, with a producer and a consumer each.
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0 or segment_states
// writes  o [B, T, H, V], ht, tiers [B, slots, H, blocks]
//
// The producers take the chunks in turn. One copies a chunk's rows into shared memory, sums the
// gates, turns q and k into q^ and k^ in place and multiplies them: what does not need the state.
// A consumer holds the state of 64 values transposed, [V][K], so that its bf16 form is an operand
// that never leaves the registers; it multiplies by A, q^ and k^. Accumulation is fp32.
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
constexpr int kGroups = 2;  // warpgroups of either role
constexpr int kBlockThreads = 2 * kGroups * kGroupThreads;
constexpr int kProducerBarrier = 1, kConsumerBarrier = 3;  // of a warpgroup, two of each

// A segment and head, worked on by kMembers warpgroups of either role: two, or one of two units.
template <int K, int kMembers>
struct alignas(1024) Unit {
  static constexpr int kValues = kMembers * kTile;
  struct Stage {
    unsigned char q[K / 64 * kTileBytes];    // [token][K], then q^
    unsigned char k[K / 64 * kTileBytes];    // [token][K], then k^
    unsigned char g[K / 64 * kTileBytes];    // [token][K], then A [token][token]
    unsigned char v[kMembers * kTileBytes];  // [token][V], then o
  } stages[kStages];
  // Factors of the state's key channels at a chunk: 2^r as it enters; before the product, 1 or
  // 2^b_C; 2^(b_C - r) as it leaves, which is used after the stage is empty.
  float enter[kStages][K], middle[kStages][K], leave[kStages + 1][K];
  float b_last[kMembers][K];       // log2 units
  float2 references[kMembers][K];  // q^ = q 2^(b - x) and k^ = k 2^(x + y - b)
  uint64_t full[kStages], empty[kStages];
  int exact[kStages];
  Segment segment;
};

template <int K, int kMembers>
struct Shared {
  Unit<K, kMembers> units[kGroups / kMembers];
  unsigned char triangle[kTileBytes];  // of ones, [token][token]
};

// What a producer does with a chunk whose rows are there.
template <int K, int kMembers>
struct Gating {
  Unit<K, kMembers>& s;
  const unsigned char* triangle;
  int member, group, thread;

  __device__ __forceinline__ void barrier() const { group_barrier<kProducerBarrier>(group); }

  // The references of a channel and what they are to the state.
  __device__ __forceinline__ void set_channel(int chunk, int channel) const {
    const int stage = chunk % kStages;
    const float b_last = s.b_last[member][channel];
    const bool exact = !(fabsf(b_last) <= kTierRange);
    const float from = exact ? 0.f : reference_of(b_last), to = exact ? b_last : from;
    s.references[member][channel] = make_float2(from, to - from);
    s.enter[stage][channel] = exp2_ftz(from);
    s.middle[stage][channel] = exact ? exp2_ftz(b_last) : 1.f;
    s.leave[chunk % (kStages + 1)][channel] = exact ? 1.f : exp2_ftz(b_last - from);
    if (exact) s.exact[stage] = 1;
  }

  // q^ and k^ of 64 channels.
  __device__ __forceinline__ void gate(int chunk, int tile, float scale) const {
    auto& tiles = s.stages[chunk % kStages];
    float b[32];
    sum_gates(b, triangle, tiles.g + tile * kTileBytes, 0);
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, t = lane % 4;
    float* b_last = s.b_last[member] + 64 * tile;
    if (row + 8 == kTile - 1) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<float2*>(b_last + 8 * j + 2 * t) =
            make_float2(kLog2E * b[4 * j + 2], kLog2E * b[4 * j + 3]);
    }
    barrier();  // b_last is written
    if (thread < 64) set_channel(chunk, 64 * tile + thread);
    barrier();  // the references are written
    bool out = false;
    const float2* references = s.references[member] + 64 * tile;
    const Fragments fragments;
    const uint32_t tile_q = shared_address(tiles.q) + tile * kTileBytes;
    const uint32_t tile_k = shared_address(tiles.k) + tile * kTileBytes;
    constexpr int kBatch = 2;  // sixteens of channels on their way at once
#pragma unroll
    for (int batch = 0; batch < 4; batch += kBatch) {
      uint32_t q[kBatch][4], k[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        fragments.load(q[i], tile_q, batch + i);
        fragments.load(k[i], tile_k, batch + i);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int j = 2 * (batch + i) + x / 2, at = 4 * j + x % 2 * 2;
          const auto r = *reinterpret_cast<const float4*>(references + 8 * j + 2 * t);
          const float e0 = b[at] * kLog2E - r.x, e1 = b[at + 1] * kLog2E - r.z;
          out |= !(fabsf(e0) <= kTierRange / 2) || !(fabsf(e1) <= kTierRange / 2);
          const float2 q_pair = unpack(q[i][x]), k_pair = unpack(k[i][x]);
          q[i][x] = pack(q_pair.x * (scale * exp2_ftz(e0)), q_pair.y * (scale * exp2_ftz(e1)));
          k[i][x] = pack(k_pair.x * exp2_ftz(r.y - e0), k_pair.y * exp2_ftz(r.w - e1));
        }
        fragments.store(tile_q, batch + i, q[i]);
        fragments.store(tile_k, batch + i, k[i]);
      }
    }
    if (out) s.exact[chunk % kStages] = 1;
  }

  // Issues A = q^ k^T.
  __device__ __forceinline__ void begin_scores(float (&A)[32], int stage) const {
    const auto& tiles = s.stages[stage];
    constexpr auto kSummed = Contiguous::kSummed;
    const uint32_t q = shared_address(tiles.q), k = shared_address(tiles.k);
    begin_products();
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      const uint32_t step = i / 4 * kTileBytes + i % 4 * kStepBytes;
      product<kSummed, kSummed>(A, descriptor(q + step, 0), descriptor(k + step, 0), i > 0);
    }
    commit_products();
  }

  // Zero above the diagonal, or everywhere where the chunk is outside tier 1.
  __device__ __forceinline__ void store_scores(unsigned char* scores, const float (&A)[32],
                                               bool exact) const {
    const Fragments fragments;
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int j = 2 * i + x / 2, e = x % 2, below = row + 8 * e - (8 * j + column);
        words[x] = pack(!exact && below >= 0 ? A[4 * j + 2 * e] : 0.f,
                        !exact && below >= 1 ? A[4 * j + 2 * e + 1] : 0.f);
      }
      fragments.store(shared_address(scores), i, words);
    }
  }
};

template <int K, int kMembers>
__device__ __forceinline__ void produce(Unit<K, kMembers>& s, const unsigned char* triangle,
                                        const Problem& p, int group, int block_v) {
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, member = group % kMembers;
  const Gating<K, kMembers> gating{s, triangle, member, group, thread};
  const auto copy = [&](int chunk) {
    if (chunk >= segment.chunks) return;
    const int stage = chunk % kStages;
    if (chunk >= kStages) wait(&s.empty[stage], static_cast<uint32_t>(chunk / kStages - 1) & 1);
    auto& tiles = s.stages[stage];
    copy_rows<K / 64, kGroupThreads>(tiles.g, p.g, segment, chunk, thread, 0, p.K);
    copy_rows<K / 64, kGroupThreads>(tiles.q, p.q, segment, chunk, thread, 0, p.K);
    copy_rows<K / 64, kGroupThreads>(tiles.k, p.k, segment, chunk, thread, 0, p.K);
    copy_rows<kMembers, kGroupThreads>(tiles.v, p.v, segment, chunk, thread, block_v, p.V);
    commit_copies();
  };
  copy(member);
  for (int chunk = member; chunk < segment.chunks; chunk += kMembers) {
    const int stage = chunk % kStages;
    auto& tiles = s.stages[stage];
    wait_for_copies<0>();
    if (thread == 0) s.exact[stage] = 0;
    gating.barrier();  // the rows are there, s.exact is cleared
#pragma unroll
    for (int tile = 0; tile < K / 64; ++tile)
      clamp_gates<64>(tiles.g + tile * kTileBytes, 0, thread);
    fence_for_products();
    gating.barrier();  // the gates are clamped
#pragma unroll 1
    for (int tile = 0; tile < K / 64; ++tile) gating.gate(chunk, tile, p.scale);
    fence_for_products();
    gating.barrier();  // q^ and k^ are written, the gates read
    float A[32];
    gating.begin_scores(A, stage);
    const bool exact = __any_sync(0xffffffffu, s.exact[stage]);
    wait_for_products<0>();
    gating.store_scores(tiles.g, A, exact);
    fence_for_products();
    arrive(&s.full[stage]);
    copy(chunk + kMembers);  // waits for consumers, of the chunk before if there are two producers
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
      const float* entering = p.segment_states + segment.state * matrix;
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

// o^T [64 values][64 tokens] of a warpgroup by way of the tile of its v, so that whole rows are
// written.
__device__ __forceinline__ void store_output(unsigned char* tile, const float (&o)[32], int group,
                                             const Problem& p, const Segment& segment, int chunk,
                                             int first_v) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, lane = thread % 32;
  group_barrier<kConsumerBarrier>(group);  // v is read
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int token = 8 * j + lane % 8 + lane / 16 * 8, part = thread / 32 * 2 + lane / 8 % 2;
    store_transposed(shared_address(tile) + swizzled(token, part), pack(o[4 * j], o[4 * j + 1]),
                     pack(o[4 * j + 2], o[4 * j + 3]), pack(o[4 * j + 4], o[4 * j + 5]),
                     pack(o[4 * j + 6], o[4 * j + 7]));
  }
  group_barrier<kConsumerBarrier>(group);  // o is written
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

// Zeros in the rows of o behind the last sequence of a packed batch.
__device__ __forceinline__ void write_tail(const Problem& p, const Segment& segment, int first_v) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int column = first_v + thread % 8 * 8;
  if (column >= p.V) return;
  bf16* o = rows_at<bf16>(p.o, 0, segment.start, segment.head) + column;
  const int64_t end =
      segment.chunks * kChunk < segment.length ? segment.chunks * kChunk : segment.length;
  for (int64_t token = thread / 8; token < end; token += kGroupThreads / 8)
    *reinterpret_cast<uint4*>(o + token * p.o.stride_t) = make_uint4(0, 0, 0, 0);
}

template <int K, int kMembers>
__device__ __forceinline__ void consume(Unit<K, kMembers>& s, const Problem& p, int group,
                                        int block_v) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  const Segment& segment = s.segment;
  const int member = group % kMembers, first_v = block_v + kTile * member;
  if (segment.tail) return write_tail(p, segment, first_v);
  const bool writes_tiers = first_v == 0 && threadIdx.x % kGroupThreads == 0;
  State<K> state;
  state.load(p, segment, first_v);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int stage = chunk % kStages;
    auto& tiles = s.stages[stage];
    const uint32_t q = shared_address(tiles.q), k = shared_address(tiles.k);
    const uint32_t v = shared_address(tiles.v) + member * kTileBytes;
    if (chunk > 0) state.scale(s.leave[(chunk - 1) % (kStages + 1)]);
    wait(&s.full[stage], static_cast<uint32_t>(chunk / kStages) & 1);
    const bool exact = __any_sync(0xffffffffu, s.exact[stage]);

    state.scale(s.enter[stage]);
    uint32_t S_operand[K / 16][4];
#pragma unroll
    for (int i = 0; i < K / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S_operand[i][e] = pack(state.x[8 * i + 2 * e], state.x[8 * i + 2 * e + 1]);
    if (exact) state.scale(s.middle[stage]);
    float o[32];  // [64 values][64 tokens]
    begin_products();
#pragma unroll
    for (int i = 0; i < K / 16; ++i)
      product(o, S_operand[i], descriptor(q + i / 4 * kTileBytes + i % 4 * kStepBytes, 0), i > 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<kOther, kSummed>(o, descriptor(v + 2048 * i, kTileBytes),
                               descriptor(shared_address(tiles.g) + kStepBytes * i, 0));
    commit_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<kOther, kOther>(state.x, descriptor(v + 2048 * i, kTileBytes),
                              descriptor(k + 2048 * i, kTileBytes));
    commit_products();
    wait_for_products<0>();
    store_output(tiles.v + member * kTileBytes, o, group, p, segment, chunk, first_v);
    arrive(&s.empty[stage]);
    if (writes_tiers)
      *reinterpret_cast<uint64_t*>(p.tiers + segment.chunk_head(p, chunk) * kMaxTierBlocks) = exact;
  }
  if (segment.chunks > 0) state.scale(s.leave[(segment.chunks - 1) % (kStages + 1)]);
  state.store(p, segment, first_v);
}

template <int K, int kMembers>
__global__ void __launch_bounds__(kBlockThreads, 1) forward_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kUnits = kGroups / kMembers;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared<K, kMembers>*>(s_bytes);
  const int v_blocks = blocks_of(p.V, s.units[0].kValues);
  const int block_v = static_cast<int>(blockIdx.x % v_blocks) * s.units[0].kValues;
  if (threadIdx.x < kUnits) {
    auto& unit = s.units[threadIdx.x];
    unit.segment =
        find_segment(p, static_cast<int64_t>(blockIdx.x / v_blocks) * kUnits + threadIdx.x);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&unit.full[stage], kGroupThreads);
      init_barrier(&unit.empty[stage], kMembers * kGroupThreads);
    }
  }
  fill_triangle<kBlockThreads>(s.triangle);
  fence_for_products();
  __syncthreads();  // the barriers, the segments and the triangle are there
  // One value a warp, so that the compiler knows the roles' branches not to diverge.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  auto& unit = s.units[group % kGroups / kMembers];
  if (group < kGroups) {
    give_registers<96>();
    if (!unit.segment.tail) produce(unit, s.triangle, p, group, block_v);
  } else {
    take_registers<160>();
    consume(unit, p, group - kGroups, block_v);
  }
#endif
}

template <int K, int kMembers>
void launch_forward(const Problem& p, cudaStream_t stream) {
  using Block = Shared<K, kMembers>;
  static const DynamicShared shared(forward_kernel<K, kMembers>, sizeof(Block));
  const int64_t blocks = blocks_of(segment_heads(p.grid, p.H), kGroups / kMembers) *
                         blocks_of(p.V, Unit<K, kMembers>::kValues);
  if (blocks == 0) return;
  shared.allow();
  forward_kernel<K, kMembers>
      <<<dim3(static_cast<unsigned>(blocks)), kBlockThreads, sizeof(Block), stream>>>(p);
}

}  // namespace

void forward(const Problem& p, cudaStream_t stream) {
  if (p.K > 64)
    launch_forward<128, 2>(p, stream);
  else if (p.V > 64)
    launch_forward<64, 2>(p, stream);
  else
    launch_forward<64, 1>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
