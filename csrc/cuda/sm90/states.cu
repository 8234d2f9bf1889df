// Forward step 2 and backward step 3 in one launch, for bf16 on sm_90a: sweeps over the chunks of a
// segment with the state, or its gradient, in registers.
//
//   S' = 2^b_C S + (k 2^(b_C - b))^T v             first chunk first
//   dS = 2^b_C dS' + (scale q 2^b)^T do            last chunk first
//
// grid    (sweep, segment, head, 128 key channels or 64, 128 values); two producer and two consumer
//         warpgroups. Where K and V are at most 64, two segments and heads a block, with a producer
//         and a consumer each.
// reads   g [B, T, H, K], k v h0, or q do dht; segment_states, segment_state_grads
// writes  S entering, or dS' leaving, every chunk, bf16 [B, chunks, H, K, V]; dh0; with S tiers.
//         For segments' own parts none of these, but segment_states or segment_state_grads and
//         segment_decays.
//
// The producers copy rows two chunks ahead and gate k or q in place, the key channels divided among
// them; the consumers hold 64 key channels, or where K is at most 64, 64 values each. Accumulation
// is fp32.
#include "../device/gates.cuh"
#include "../device/launch.cuh"
#include "cumsum.cuh"
#include "dynamic_shared.h"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kStages = 3;
constexpr int kGroups = 2;  // warpgroups of either role
constexpr int kBlockThreads = 2 * kGroups * kGroupThreads;
// The first of a unit with two members, the others of a warpgroup, two of each.
constexpr int kProducerBarrier = 1, kGatingBarrier = 2, kConsumerBarrier = 4;

// Which of the two sweeps, and whether it stores every chunk's state or its segment's own part.
enum class Sweep { kStates, kStateGrads };
enum class Store { kChunks, kSegment };

// A segment and head, worked on by kMembers warpgroups of either role: two, or one of two units.
template <int K, int kMembers>
struct alignas(1024) Unit {
  static constexpr int kValues = K == 128 ? 128 : kMembers * kTile;
  struct Stage {
    unsigned char y[K / 64 * kTileBytes];        // k or q [token][K], then gated
    unsigned char g[K / 64 * kTileBytes];        // [token][K]
    unsigned char x[kValues / 64 * kTileBytes];  // v or do [token][V]
  } stages[kStages];
  unsigned char state[K / 64 * (kValues / 64) * kTileBytes];  // [K][V]
  float b_last[K];                                            // log2 units
  float decay[kStages][K];                                    // 2^b_C
  uint64_t full[kStages], empty[kStages];
  int exact[kStages];
  Segment segment;
};

template <int K, int kMembers>
struct Shared {
  Unit<K, kMembers> units[kGroups / kMembers];
  unsigned char triangle[kTileBytes];  // of ones, [token][token]
};

template <Sweep kSweep>
struct Fields {
  static constexpr bool kStates = kSweep == Sweep::kStates;
  static __device__ __forceinline__ const Rows& y(const Problem& p) { return kStates ? p.k : p.q; }
  static __device__ __forceinline__ const Rows& x(const Problem& p) {
    return kStates ? p.v : p.d_o;
  }
  static __device__ __forceinline__ const float* initial(const Problem& p) {
    return kStates ? p.h0 : p.dht;
  }
  static __device__ __forceinline__ float* final(const Problem& p) {
    return kStates ? p.ht : p.dh0;
  }
  static __device__ __forceinline__ float* segment_states(const Problem& p) {
    return kStates ? p.segment_states : p.segment_state_grads;
  }
  static __device__ __forceinline__ bf16* chunk_states(const Problem& p) {
    return static_cast<bf16*>(kStates ? p.S : p.dS);
  }
  // Whether nothing comes before, or follows, in the order of the sweep.
  static __device__ __forceinline__ bool begins(const Segment& s) {
    return kStates ? s.first : s.last;
  }
  static __device__ __forceinline__ bool ends(const Segment& s) {
    return kStates ? s.last : s.first;
  }
  static __device__ __forceinline__ int chunk(const Segment& s, int i) {
    return kStates ? i : s.chunks - 1 - i;
  }
};

// Gates k or q of a chunk in place; a producer has K / kMembers of the key channels.
template <int K, int kMembers, Sweep kSweep>
struct Gating {
  static constexpr int kColumns = K / kMembers;
  Unit<K, kMembers>& s;
  const unsigned char* triangle;
  int group, thread, first;
  float total = 0;  // of the gates of channel `thread` in the segment, log2 units

  __device__ __forceinline__ void barrier() const { group_barrier<kGatingBarrier>(group); }

  __device__ __forceinline__ void run(int stage, float scale) {
    auto& tiles = s.stages[stage];
    const int tile = first / 64 * kTileBytes, column = first % 64;
    clamp_gates<kColumns>(tiles.g + tile, column, thread);
    fence_for_products();
    barrier();  // the gates are clamped, s.b_last of the chunk before is read
    float b[kColumns / 2];
    sum_gates(b, triangle, tiles.g + tile, column);
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, t = lane % 4;
    if (row + 8 == kTile - 1) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        *reinterpret_cast<float2*>(&s.b_last[first + 8 * j + 2 * t]) =
            make_float2(kLog2E * b[4 * j + 2], kLog2E * b[4 * j + 3]);
    }
    barrier();  // s.b_last is written
    if (thread < kColumns) {
      const float b_last = s.b_last[first + thread];
      s.decay[stage][first + thread] = exp2_ftz(b_last);
      total += b_last;
    }
    bool out = false;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const auto b_last = *reinterpret_cast<const float2*>(&s.b_last[first + 8 * j + 2 * t]);
      unsigned char* y = tiles.y + tile + swizzled(row, column / 8 + j) + 4 * t;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto* word = reinterpret_cast<uint32_t*>(y + e * 1024);
        const float2 pair = unpack(*word);
        const float b0 = b[4 * j + 2 * e] * kLog2E, b1 = b[4 * j + 2 * e + 1] * kLog2E;
        if constexpr (kSweep == Sweep::kStates) {
          out |= out_of_tier1(b0, b_last.x) || out_of_tier1(b1, b_last.y);
          *word = pack(pair.x * exp2_ftz(b_last.x - b0), pair.y * exp2_ftz(b_last.y - b1));
        } else {
          *word = pack(pair.x * (scale * exp2_ftz(b0)), pair.y * (scale * exp2_ftz(b1)));
        }
      }
    }
    if (out) s.exact[stage] = 1;
  }
};

template <int K, int kMembers, Sweep kSweep, Store kStore>
__device__ __forceinline__ void produce(Unit<K, kMembers>& s, const unsigned char* triangle,
                                        const Problem& p, int group, int first_k, int first_v) {
  using F = Fields<kSweep>;
  constexpr int kThreads = kMembers * kGroupThreads, kValueTiles = Unit<K, kMembers>::kValues / 64;
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x) % kThreads, member = group % kMembers;
  Gating<K, kMembers, kSweep> gating{s, triangle, group, thread % kGroupThreads,
                                     member * (K / kMembers)};
  const int start = F::chunk(segment, 0);
  const auto copier = [&](auto tiles, const Rows& r, int first, int columns) {
    return RowCopier<decltype(tiles)::value, kThreads>(r, token_offset(r, 1), segment, start,
                                                       thread, first, columns);
  };
  using KeyTiles = std::integral_constant<int, K / 64>;
  auto g = copier(KeyTiles{}, p.g, first_k, p.K), y = copier(KeyTiles{}, F::y(p), first_k, p.K);
  auto x = copier(std::integral_constant<int, kValueTiles>{}, F::x(p), first_v, p.V);
  const auto copy = [&](int i) {
    if (i < segment.chunks) {
      const int stage = i % kStages, length = segment.length_of(F::chunk(segment, i));
      if (i >= kStages) wait(&s.empty[stage], static_cast<uint32_t>(i / kStages - 1) & 1);
      g.copy(s.stages[stage].g, length);
      y.copy(s.stages[stage].y, length);
      x.copy(s.stages[stage].x, length);
      constexpr int kStep = kSweep == Sweep::kStates ? 1 : -1;
      g.move(kStep), y.move(kStep), x.move(kStep);
    }
    commit_copies();
  };
  for (int i = 0; i < kStages - 1; ++i) copy(i);
  for (int i = 0; i < segment.chunks; ++i) {
    const int stage = i % kStages;
    wait_for_copies<kStages - 2>();
    if (thread == 0) s.exact[stage] = 0;
    // The rows are there, s.exact is cleared.
    if constexpr (kMembers == 2)
      sync_threads<kProducerBarrier>(kThreads);
    else
      gating.barrier();
    gating.run(stage, p.scale);
    fence_for_products();
    arrive(&s.full[stage]);
    copy(i + kStages - 1);  // waits for the consumers, which are a chunk behind
  }
  // The gradients' sweep adds up in the other order: it writes what the states' leaves out.
  const int channel = first_k + gating.first + gating.thread;
  const bool writes = kStore == Store::kSegment && (kSweep == Sweep::kStates || segment.last);
  if (writes && first_v == 0 && gating.thread < gating.kColumns && channel < p.K)
    p.segment_decays[segment.state * p.K + channel] = gating.total;
}

// A consumer's part of the state: 64 key channels by 128 values, or 64.
template <int K>
struct State {
  static constexpr int kValues = K;  // of a consumer: K is 128 or 64
  float x[kValues / 2];
  int first_k, first_v;

  __device__ __forceinline__ State(int member, int block_k, int block_v)
      : first_k(K == 128 ? block_k + 64 * member : block_k),
        first_v(K == 128 ? block_v : block_v + 64 * member) {}

  // f(x0, x1, key, value) of neighbours
  template <class F>
  __device__ __forceinline__ void for_pairs(const Problem& p, F&& f) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kValues / 2; i += 2) {
      const int k = first_k + row + i / 2 % 2 * 8, v = first_v + i / 4 * 8 + 2 * (lane % 4);
      if (k < p.K && v < p.V) f(x[i], x[i + 1], k, v);
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) x[i] = 0;
  }
  __device__ __forceinline__ void load(const Problem& p, const float* state, bool v_first) {
    if (state == nullptr) return;
    for_pairs(p, [&](float& x0, float& x1, int k, int v) {
      x0 = state[v_first ? v * p.K + k : k * p.V + v];
      x1 = state[v_first ? (v + 1) * p.K + k : k * p.V + v + 1];
    });
  }
  __device__ __forceinline__ void store(const Problem& p, float* state, bool v_first) {
    for_pairs(p, [&](float x0, float x1, int k, int v) {
      if (v_first) {
        state[v * p.K + k] = x0;
        state[(v + 1) * p.K + k] = x1;
      } else {
        *reinterpret_cast<float2*>(state + k * p.V + v) = make_float2(x0, x1);
      }
    });
  }

  // As bf16 rows [K][V] of one chunk by way of `tile`, which a warpgroup has for itself.
  __device__ __forceinline__ void store_chunk(bf16* state, unsigned char* tile, const Problem& p,
                                              int group) const {
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    const Fragments fragments;
    group_barrier<kConsumerBarrier>(group);  // the rows of the chunk before are read
#pragma unroll
    for (int i = 0; i < kValues / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) words[e] = pack(x[8 * i + 2 * e], x[8 * i + 2 * e + 1]);
      fragments.store(shared_address(tile) + i / 4 * kTileBytes, i % 4, words);
    }
    group_barrier<kConsumerBarrier>(group);  // the rows are written
    constexpr int kParts = kValues / 8, kRowsEach = kGroupThreads / kParts;
    const int part = thread % kParts, v = first_v + 8 * part;
#pragma unroll
    for (int i = 0; i < kTile / kRowsEach; ++i) {
      const int row = thread / kParts + i * kRowsEach, k = first_k + row;
      if (k < p.K && v < p.V)
        *reinterpret_cast<uint4*>(state + k * p.V + v) =
            *reinterpret_cast<const uint4*>(tile + part / 8 * kTileBytes + swizzled(row, part % 8));
    }
  }
};

template <int K, int kMembers, Sweep kSweep, Store kStore>
__device__ __forceinline__ void consume(Unit<K, kMembers>& s, const Problem& p, int group,
                                        int block_k, int block_v) {
  using F = Fields<kSweep>;
  const Segment& segment = s.segment;
  const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
  const int64_t boundary = (segment.n * p.H + segment.head) * matrix;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, member = group % kMembers;
  unsigned char* tile = s.state + member * (K / 64) * kTileBytes;
  State<K> state(member, block_k, block_v);
  state.clear();
  if constexpr (kStore == Store::kChunks) {
    if (!F::begins(segment))
      state.load(p, F::segment_states(p) + segment.state * matrix, false);
    else if (F::initial(p) != nullptr)
      state.load(p, F::initial(p) + boundary, p.state_v_first);
  }
  for (int i = 0; i < segment.chunks; ++i) {
    const int stage = i % kStages;
    const int64_t chunk_head = segment.chunk_head(p, F::chunk(segment, i));
    if constexpr (kStore == Store::kChunks)
      state.store_chunk(F::chunk_states(p) + chunk_head * matrix, tile, p, group);
    wait(&s.full[stage], static_cast<uint32_t>(i / kStages) & 1);
    const int row = state.first_k - block_k + thread / 32 * 16 + thread % 32 / 4;
    const float decays[2] = {s.decay[stage][row], s.decay[stage][row + 8]};
#pragma unroll
    for (int e = 0; e < state.kValues / 2; ++e) state.x[e] *= decays[e / 2 % 2];
    const auto& tiles = s.stages[stage];
    const uint32_t y = shared_address(tiles.y) + (state.first_k - block_k) / 64 * kTileBytes;
    const uint32_t x = shared_address(tiles.x) + (state.first_v - block_v) / 64 * kTileBytes;
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      product<Contiguous::kOther, Contiguous::kOther>(state.x,
                                                      descriptor(y + 2048 * step, kTileBytes),
                                                      descriptor(x + 2048 * step, kTileBytes));
    commit_products();
    if (kSweep == Sweep::kStates && kStore == Store::kChunks && block_v == 0 && member == 0 &&
        thread == 0)
      *reinterpret_cast<uint16_t*>(p.tiers + chunk_head * kMaxTierBlocks + block_k / kTierBlock) =
          static_cast<uint16_t>(s.exact[stage]);
    wait_for_products<0>();
    arrive(&s.empty[stage]);
  }
  if constexpr (kStore == Store::kSegment)
    state.store(p, F::segment_states(p) + segment.state * matrix, false);
  else if (F::ends(segment) && F::final(p) != nullptr)
    state.store(p, F::final(p) + boundary, p.state_v_first);
}

template <int K, int kMembers, Sweep kSweep, Store kStore>
__device__ __forceinline__ void sweep(Shared<K, kMembers>& s, const Problem& p, int64_t index) {
  constexpr int kUnits = kGroups / kMembers, kValues = Unit<K, kMembers>::kValues;
  const int v_blocks = blocks_of(p.V, kValues), k_blocks = blocks_of(p.K, K);
  const int first_v = static_cast<int>(index % v_blocks) * kValues;
  index /= v_blocks;
  const int first_k = static_cast<int>(index % k_blocks) * K;
  if (threadIdx.x < kUnits) {
    auto& unit = s.units[threadIdx.x];
    unit.segment = find_segment(p, index / k_blocks * kUnits + threadIdx.x);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&unit.full[stage], kMembers * kGroupThreads);
      init_barrier(&unit.empty[stage], kMembers * kGroupThreads);
    }
  }
  fill_triangle<kBlockThreads>(s.triangle);
  fence_for_products();
  __syncthreads();  // the barriers, the segments and the triangle are there
  // One value a warp, so that the compiler knows the roles' branches not to diverge.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  auto& unit = s.units[group % kGroups / kMembers];
  // The own part of the last segment of a sweep concerns nobody.
  const bool idle =
      unit.segment.tail || (kStore == Store::kSegment && Fields<kSweep>::ends(unit.segment));
  if (group < kGroups) {
    give_registers<88>();
    if (!idle) produce<K, kMembers, kSweep, kStore>(unit, s.triangle, p, group, first_k, first_v);
  } else {
    take_registers<168>();
    if (!idle) consume<K, kMembers, kSweep, kStore>(unit, p, group - kGroups, first_k, first_v);
  }
}

template <int K, int kMembers, Store kStore>
__global__ void __launch_bounds__(kBlockThreads, 1) states_kernel(Problem p, int64_t states) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared<K, kMembers>*>(s_bytes);
  if (blockIdx.x < states)
    sweep<K, kMembers, Sweep::kStates, kStore>(s, p, blockIdx.x);
  else
    sweep<K, kMembers, Sweep::kStateGrads, kStore>(s, p, blockIdx.x - states);
#endif
}

template <int K, int kMembers, Store kStore>
void launch_states(const Problem& p, bool states, bool state_grads, cudaStream_t stream) {
  using Block = Shared<K, kMembers>;
  static const DynamicShared shared(states_kernel<K, kMembers, kStore>, sizeof(Block));
  const int64_t sweep_blocks = blocks_of(segment_heads(p.grid, p.H), kGroups / kMembers) *
                               blocks_of(p.K, K) * blocks_of(p.V, Unit<K, kMembers>::kValues);
  const int64_t blocks = sweep_blocks * (states + state_grads);
  if (blocks == 0) return;
  shared.allow();
  states_kernel<K, kMembers, kStore>
      <<<dim3(static_cast<unsigned>(blocks)), kBlockThreads, sizeof(Block), stream>>>(
          p, states ? sweep_blocks : 0);
}

template <Store kStore>
void launch_states(const Problem& p, bool states, bool state_grads, cudaStream_t stream) {
  if (p.K > 64)
    launch_states<128, 2, kStore>(p, states, state_grads, stream);
  else if (p.V > 64)
    launch_states<64, 2, kStore>(p, states, state_grads, stream);
  else
    launch_states<64, 1, kStore>(p, states, state_grads, stream);
}

}  // namespace

void chunk_states(const Problem& p, cudaStream_t stream) {
  launch_states<Store::kChunks>(p, true, true, stream);  // also where no chunk needs S or dS
}

void segment_parts(const Problem& p, cudaStream_t stream) {
  launch_states<Store::kSegment>(p, p.segment_states != nullptr, p.segment_state_grads != nullptr,
                                 stream);
}

}  // namespace gla_ext::cuda::sm90
