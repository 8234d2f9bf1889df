// prepare.cu and the states of states/prepared.cu in one pass over the chunks. The two blocks of a
// cluster take turns to gate a segment's chunks, as in forward/cluster.cu; each block has 128
// values of the state.
//
//   q^ = scale q 2^(b - from)      k^ = k 2^(to - b)      A = tril(q^ k^T)
//   S~ = 2^from S                  S' = 2^(b_C - from) (S~ + k^T v)
//
// grid    (segment, head, 256 values) by a cluster, which takes up to four of them in sequence; a
//         block has two producer and two consumer warpgroups; no packed sequences
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0
// writes  prepared chunks [B, entries, H], tiers [B, entries, H, blocks], S~ of every chunk as
// tiles
//         [B, chunks, H]. For summaries: segment_states and segment_decays in place of S~, and A
//         only if kWithA
//
// For packed sequences it makes only summaries:
// grid    (summary, head, 256 values) by a cluster; the last segment of a sequence is skipped, as
//         nothing reads its summary
// reads   k, g, v
// writes  segment_states and segment_decays
//
// A producer stores gated chunks to memory from where it gated them, and sends k^ and the factors
// to the other block. A consumer holds 64 key channels by the block's 128 values; both consumers
// copy rows of v. A of strong chunks comes from strong/gradients.cu, in forward from
// segments/scan.cu. The loop over the state resembles that of states/prepared.cu; here S~ is stored
// from registers, because producers and received chunks fill shared memory. Accumulation is fp32.
#include "cuda/sm90/prepare/prepared.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/cluster_launch.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "cuda/sm90/tiles/gating.cuh"
#include "cuda/sm90/tiles/lane_rows.cuh"
#include "fused/state.cuh"
#include "fused/sweeps.cuh"
#include "tiles.cuh"

namespace gla_ext::cuda::sm90 {
namespace states::cluster {

constexpr int kValueTiles = kValues / kTile;
constexpr int kGateStages = 2, kValueStages = 3;
constexpr int kConsumerThreads = kGroups * kGroupThreads;

// The shared memory in which a producer gates.
struct Gated {
  KeyGroup group;                  // rows of q and k, then q^ and k^
  Tile g[kGateStages][kKeyTiles];  // of two chunks; A replaces the first tile
};

// The part of a gated chunk that the state needs: the end of a KeyGroup.
struct alignas(1024) Keys {
  float factors[kFactors][kGroupKeys];
  Tile k[kKeyTiles];  // k^ [token][K]
};
static_assert(sizeof(Keys) == sizeof(KeyGroup) - offsetof(KeyGroup, factors));
static_assert(offsetof(Keys, k) == offsetof(KeyGroup, k) - offsetof(KeyGroup, factors));

template <int kItems>
struct alignas(1024) Shared {
  Gated own[kGroups];                 // gated by this block's producers
  Keys received[kGroups];             // received from the other block's producers
  Tile v[kValueStages][kValueTiles];  // [token][V]
  Tile triangle;                      // ones on and below the diagonal, [token][token]
  float2 references[kGroups][kGroupKeys];
  Handover handover;
  // full: the rows that both consumers copy have arrived. empty: both consumers have multiplied
  // them.
  uint64_t v_full[kValueStages], v_empty[kValueStages];
  uint64_t gates_full[kGroups], rows_full[kGroups];  // a producer's copies have arrived
  int strong[kGroups];                               // whether a producer's chunk has strong gates
  Items<kItems> items;

  // Called by one thread.
  __device__ __forceinline__ void init_barriers() {
    handover.init();
    for (int i = 0; i < kValueStages; ++i) {
      init_barrier(&v_full[i], kConsumerThreads);
      init_barrier(&v_empty[i], kConsumerThreads / 32);  // warps
    }
    for (int i = 0; i < kGroups; ++i) {
      init_barrier(&gates_full[i], kGroupThreads);
      init_barrier(&rows_full[i], kGroupThreads);
    }
    fence_barriers();
  }
};

// A producer and its chunks. Gates are copied one chunk ahead of q and k. kOperands: stores
// prepared chunks, with A if kWithA; without it only k^ is made.
template <bool kOperands, bool kWithA, int kItems>
class Producer {
 public:
  __device__ __forceinline__ Producer(Shared<kItems>& s, const Problem& p, int group, int rank)
      : s_(s), p_(p), group_(group), rank_(rank), asked_(s.items, group, rank) {}

  __device__ __forceinline__ void run() {
    const auto barrier = [this] { sync(); };
    const Gating<kGroupKeys, decltype(barrier)> gate{s_.triangle, thread(), barrier};
    auto& factors = own().group.factors;
    ask_for_gates();
    while (asked_.is_there()) {
      ask_for_rows();
      number_ = asked_.number;
      chunk_head_ = asked_.segment().chunk_head(p_, asked_.chunk());
      asked_.next();
      wait(&s_.gates_full[group_], s_.handover.parity_of(number_));
      const GatedChunk chunk{own().group.q,      own().group.k,    gates(number_),
                             factors[kEnter],    factors[kMiddle], factors[kLeave],
                             &s_.strong[group_], factors[kSum],    s_.references[group_]};
      if constexpr (!kOperands) {
        gate.gate_keys(chunk, *this);
        fence_for_products();  // also for bulk copies
        sync();                // k^ is written, the gates are read
        ready();
        continue;  // once their stage is free again, k^ and the factors have been sent
      } else if constexpr (!kWithA) {
        gate.gate_operands(chunk, p_.scale, *this);
      } else {
        if (thread() == 0) wait_for_bulk_stores();  // of the previous A, over these gates
        gate(chunk, p_.scale, *this);
        fence_for_products();  // also for bulk stores
        sync();                // A is written
        if (thread() == 0) send_scores();
      }
      if (thread() == 0) {
        store_tier();
        wait_for_bulk_stores<kWithA>();
      }
      sync();  // the stores have read the prepared chunk
    }
    if (thread() == 0) wait_for_bulk_stores();  // the block must not end earlier
  }

  // Hooks that Gating calls while a chunk is gated.
  __device__ __forceinline__ void begin() const { ask_for_gates(); }
  __device__ __forceinline__ void await_rows() const {
    wait(&s_.rows_full[group_], s_.handover.parity_of(number_));
  }
  __device__ __forceinline__ void ready() const {
    arrive(&s_.handover.own_full[group_]);
    if (thread() != 0) return;
    const int other = 1 - rank_;
    const uint32_t full = s_.handover.expect_in_other(group_, other, sizeof(Keys));
    bulk_send(address_in(&s_.received[group_], other), own().group.factors, sizeof(Keys), full);
    if constexpr (kOperands) {
      bulk_store(prepared_at(p_, chunk_head_), &own().group, sizeof(KeyGroup));
      commit_bulk_stores();
    }
  }

 private:
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x) % kGroupThreads;
  }
  __device__ __forceinline__ void sync() const { group_barrier<kClusterProducerBarrier>(group_); }
  __device__ __forceinline__ Gated& own() const { return s_.own[group_]; }
  __device__ __forceinline__ Tile* gates(int number) const {
    return own().g[number / kGroups % kGateStages];
  }
  __device__ __forceinline__ void copy(const Tile* to, const Rows& rows) const {
    copy_rows<kKeyTiles, kGroupThreads>(to, rows, asked_.segment(), asked_.chunk(), thread(), 0,
                                        p_.K);
  }
  __device__ __forceinline__ void ask_for_gates() const {
    if (!asked_.is_there()) return;
    copy(gates(asked_.number), p_.g);
    arrive_after_copies(&s_.gates_full[group_]);
  }
  __device__ __forceinline__ void ask_for_rows() const {
    if constexpr (kOperands) copy(own().group.q, p_.q);
    s_.handover.wait_for_place(asked_.number);  // k^ and the factors of the previous chunk are read
    copy(own().group.k, p_.k);
    arrive_after_copies(&s_.rows_full[group_]);
  }
  // Stores A to memory; store_tier stores whether the chunk has strong gates. Called by one thread.
  __device__ __forceinline__ void send_scores() const {
    bulk_store(prepared_at(p_, chunk_head_) + offsetof(PreparedChunk<1>, A), gates(number_),
               kTileBytes);
    commit_bulk_stores();
  }
  __device__ __forceinline__ void store_tier() const {
    unsigned char* out = prepared_at(p_, chunk_head_);
    const int strong = s_.strong[group_];
    *reinterpret_cast<int4*>(out + offsetof(PreparedChunk<1>, strong)) = make_int4(strong, 0, 0, 0);
    *reinterpret_cast<uint64_t*>(p_.tiers + chunk_head_ * kMaxTierBlocks) = strong != 0 ? kTile : 0;
  }

  Shared<kItems>& s_;
  const Problem& p_;
  const int group_, rank_;
  OwnChunk<kItems> asked_;  // the chunk whose rows are copied next
  int number_ = 0;          // of the chunk that is being gated
  int64_t chunk_head_ = 0;
};

// Rows of v, which both consumers copy. Chunks are numbered through all items.
template <int kItems>
class Values {
 public:
  __device__ __forceinline__ Values(Shared<kItems>& s, const Problem& p, const Segment& segment,
                                    int first, int first_v)
      : s_(s),
        segment_(segment),
        first_(first),
        rows_(p.v, token_offset(p.v, 1), segment, 0,
              static_cast<int>(threadIdx.x) % kConsumerThreads, first_v, p.V) {}

  // Starts the copies of a chunk's rows once both consumers have released the stage.
  __device__ __forceinline__ void copy(int chunk) {
    if (chunk >= segment_.chunks) return;
    const int number = first_ + chunk;
    if (number >= kValueStages) wait(&s_.v_empty[stage(chunk)], parity(number - kValueStages));
    rows_.copy(at(chunk), segment_.length_of(chunk));
    arrive_after_copies(&s_.v_full[stage(chunk)]);
    rows_.move(1);
  }
  __device__ __forceinline__ void await(int chunk) const {
    wait(&s_.v_full[stage(chunk)], parity(first_ + chunk));
  }
  // Called by all threads of a warp once its products have read the chunk.
  __device__ __forceinline__ void leave(int chunk) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&s_.v_empty[stage(chunk)]);
  }
  __device__ __forceinline__ const Tile* at(int chunk) const { return s_.v[stage(chunk)]; }

 private:
  __device__ __forceinline__ int stage(int chunk) const { return (first_ + chunk) % kValueStages; }
  __device__ __forceinline__ static uint32_t parity(int number) {
    return static_cast<uint32_t>(number / kValueStages) & 1;
  }
  Shared<kItems>& s_;
  const Segment& segment_;
  const int first_;  // number of chunks in earlier items
  RowCopier<kValueTiles, kConsumerThreads> rows_;
};

// Works on one item. before: how many chunks each block has gated in earlier items.
template <Store kStore, int kItems>
__device__ __forceinline__ void consume(Shared<kItems>& s, const Problem& p, const Segment& segment,
                                        const int (&before)[kClusterBlocks], int group, int first_v,
                                        int rank) {
  if (segment.tail) return;
  Values<kItems> values(s, p, segment, before[0] + before[1], first_v);
#pragma unroll
  for (int i = 0; i < kValueStages - 1; ++i) values.copy(i);
  State<kGroupKeys> state(group, 0, first_v);
  state.clear();
  if constexpr (kStore == Store::kChunks) load_entering<Sweep::kStates>(state, p, segment);
  const auto scale = [&](float first, float second) {
#pragma unroll
    for (int e = 0; e < state.kValues / 2; ++e) state.x[e] *= e / 2 % 2 == 0 ? first : second;
  };
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int row = group * kTile + thread / 32 * 16 + thread % 32 / 4;  // also has row + 8
  Tile* S = state_tile_at(p, p.S, segment.chunk_head(p, 0), first_v / kTile, group);
  float out[2] = {1.f, 1.f};  // factor still to be applied to the state when it leaves a chunk
  float decay[2] = {};        // sum of the gates, log2 units
  for (int chunk = 0; chunk < segment.chunks; ++chunk, S = next_state_tile(p, S)) {
    const Turn turn(chunk, before);
    const auto& keys = turn.rank == rank
                           ? *reinterpret_cast<const Keys*>(s.own[turn.producer].group.factors)
                           : s.received[turn.producer];
    s.handover.wait_for_chunk(turn, rank);
    // `middle` is read last: its first use waits for the loads of all factors.
    const auto* factors = reinterpret_cast<const volatile float (*)[kGroupKeys]>(keys.factors);
    if constexpr (kStore == Store::kSegment) {
      decay[0] += factors[kSum][row];
      decay[1] += factors[kSum][row + 8];
    }
    const float in[2] = {factors[kEnter][row] * out[0], factors[kEnter][row + 8] * out[1]};
    out[0] = factors[kLeave][row], out[1] = factors[kLeave][row + 8];
    const float middle[2] = {factors[kMiddle][row], factors[kMiddle][row + 8]};
    const bool strong = __any_sync(0xffffffffu, middle[0] != 1.f || middle[1] != 1.f);
    values.await(chunk);
    // The fence is for the next copies of v, and for the factors, which a bulk copy will overwrite
    // once they are read. Placed later, it would wait for this chunk's stores to memory.
    fence_for_products();
    scale(in[0], in[1]);
    LaneRows<state.kValues> rows(state.x);
    if (strong) scale(middle[0], middle[1]);
    begin_products();
#pragma unroll
    for (int j = 0; j < kTile / 16; ++j)
      product<Contiguous::kOther, Contiguous::kOther>(state.x, sixteen_rows(keys.k[group], j),
                                                      sixteen_rows(*values.at(chunk), j));
    commit_products();
    if constexpr (kStore == Store::kChunks) rows.write_tiles(S, kKeyTiles);
    values.copy(chunk + kValueStages - 1);
    wait_for_products<0>();
    s.handover.leave(turn, rank);
    values.leave(chunk);
  }
  if constexpr (kStore == Store::kSegment) {
    if (segment.chunks == 0) return;  // may happen with packed sequences
    if (first_v == 0 && thread % 4 == 0) {
      float* decays = p.segment_decays + segment.state * p.K;
      if (row < p.K) decays[row] = decay[0];
      if (row + 8 < p.K) decays[row + 8] = decay[1];
    }
    if (segment.last && !p.grid.with_last) return;  // nothing reads its summary
    scale(out[0], out[1]);
    state.store(p, p.segment_states + segment.state * p.K * p.V, false);
  }
}

// kOperands: also stores prepared chunks, with A if kWithA. Without it a work item is a summary.
template <int kItems, Store kStore, bool kOperands = true, bool kWithA = kOperands>
__global__ void __launch_bounds__(kBlockThreads, 1) kernel(Problem p, int64_t items) {
  static_assert(kOperands || kItems == 1, "a cluster has one item, which is not counted");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared<kItems>*>(s_bytes);
  const Cluster cluster;
  if (!kOperands && !has_state(p, cluster.index / value_clusters(p))) return;
  if constexpr (kOperands) {
    s.items.find(p, items, cluster);
  } else if (threadIdx.x == 0) {
    Segment& segment = s.items.segments[0];
    segment = find_segment_of_state(p, cluster.index / value_clusters(p));
    if (segment.last || segment.tail) segment.chunks = 0;
  }
  if (threadIdx.x == 0) s.init_barriers();
  fill_triangle<kBlockThreads>(s.triangle);
  fence_for_products();
  sync_cluster();  // the barriers, the segments and the triangle are written
  const int group = warpgroup();
  if (group < kGroups) {
    give_registers<104>();
    Producer<kOperands, kWithA, kItems>(s, p, group, cluster.rank).run();
  } else {
    take_registers<152>();
    s.items.for_items(
        p, cluster, [&](const Segment& segment, int first_v, const int (&before)[kClusterBlocks]) {
          consume<kStore>(s, p, segment, before, group - kGroups, first_v, cluster.rank);
        });
  }
  sync_cluster();  // from here on the other block writes nothing to this one
#endif
}

void launch_states(const Problem& p, cudaStream_t stream) {
  launch_clusters<Shared, kernel<1, Store::kChunks>, kernel<kMostItems, Store::kChunks>>(p, stream);
}

// Summaries of `items`, one per cluster.
template <bool kOperands, bool kWithA>
void launch_summaries(const Problem& p, int64_t items, cudaStream_t stream) {
  if (items > 0)
    launch_items<kernel<1, Store::kSegment, kOperands, kWithA>, Shared<1>>(p, items, items, stream);
}

}  // namespace states::cluster

void launch_states_cluster(const Problem& p, cudaStream_t stream) {
  states::cluster::launch_states(p, stream);
}

void launch_summaries_cluster(const Problem& p, cudaStream_t stream) {
  states::cluster::launch_summaries<true, true>(p, count_items(p), stream);
}

void launch_summaries_cluster_without_A(const Problem& p, cudaStream_t stream) {
  states::cluster::launch_summaries<true, false>(p, count_items(p), stream);
}

void launch_summaries_packed(const Problem& p, cudaStream_t stream) {
  const int64_t items = segment_state_heads(p.grid, p.H) * value_clusters(p);
  states::cluster::launch_summaries<false, false>(p, items, stream);
}

}  // namespace gla_ext::cuda::sm90
