// Prepared chunks: the operands of a chunk that do not depend on the state, so that the sweeps and
// gradients that read them need no gates:
//
//   q^ = scale q 2^(b - from)      k^ = k 2^(to - b)      A = tril(q^ k^T)
//
// and the factors that the state is multiplied by. For a channel in tier 1's range, from = to = r;
// out of range, from = 0 and to = b_C, which is exact at any gate against the state. A of a strong
// chunk is computed by forward steps 3 and 4 for such chunks. In backward, its backward steps 5 and
// 6 are done here too, except in the first half of a pass over several ranks, which has no
// gradients to write to.
//
// grid    as many blocks as are resident, of two warpgroups; a block takes (row, chunk, head) items
//         gridDim.x apart, 128 key channels at a time
// reads   q, k, g [B, T, H, K]; in backward v, do [B, T, H, V] of strong chunks
// writes  prepared chunks [B, entries, H], tiers [B, entries, H, blocks]; A of tier-1 chunks only
// where
//         something reads it (with_A); in backward dq_intra, dk_intra, dg_intra [B, T, H, K] fp32
//         of strong chunks
//
// Past alone (device/gates.cuh; forward), r = 0 and A of a strong chunk's rows before the first
// strong one is made here as in tier 1. It needs k 2^-b, so k^ of channels out of range lies in the
// place of their gates meanwhile, as in tiles/gating.cuh.
//
// While 128 key channels are gated in place, the rows of the next 128 are copied; with fp32 gates
// there is no room for that. b and the accumulation of A are fp32. dA of strong chunks is bf16, in
// shared memory.
#include <algorithm>

#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/strong/intra.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "cuda/sm90/tiles/products.cuh"
#include "prepared.cuh"

namespace gla_ext::cuda::sm90 {
namespace prepare {

constexpr int kThreadsOfBlock = kKeyTiles * kGroupThreads;
static_assert(kThreadsOfBlock == kThreads, "chunks with strong gates take as many");
constexpr int kBlocksEach = 2;  // blocks a multiprocessor

// The rows of 128 key channels of a chunk.
template <class Gate>
struct Rows128 {
  KeyGroup group;              // rows of q and k, then q^ and k^
  Gate g[kTile * kGroupKeys];  // [token][128]; A replaces them
  __device__ __forceinline__ Tile& A() { return *reinterpret_cast<Tile*>(g); }
};

// A work item: 128 key channels of a chunk. A block takes one item at a time.
struct Item {
  uint32_t index;  // number of (row, chunk, head); the host keeps it within 31 bits
  int first;       // first key channel

  static __device__ __forceinline__ Item first_of_block(const Problem& p) {
    Item item{blockIdx.x, 0};
    item.find(p);
    return item;
  }
  __device__ __forceinline__ bool is_there(const Problem& p) const {
    return index < static_cast<uint32_t>(p.grid.B * p.grid.entries) * p.H;
  }
  __device__ __forceinline__ Chunk chunk(const Problem& p) const { return find_chunk(p, index); }
  __device__ __forceinline__ bool is_last_of_chunk(const Problem& p) const {
    return first + kGroupKeys >= p.K;
  }
  __device__ __forceinline__ Item next(const Problem& p) const {
    Item item = *this;
    item.first += kGroupKeys;
    if (item.first < p.K) return item;
    item.first = 0;
    item.index += gridDim.x;
    item.find(p);
    return item;
  }

 private:
  // Skips chunks without tokens of a sequence.
  __device__ __forceinline__ void find(const Problem& p) {
    if (!p.grid.packed) return;
    for (; is_there(p); index += gridDim.x) {
      const Chunk c = chunk(p);
      if (c.length > 0 && !c.tail) return;
    }
  }
};

template <class Gate>
struct alignas(1024) Shared {
  static constexpr int kStages = sizeof(Gate) == 2 ? 2 : 1;
  union Stage {
    Rows128<Gate> rows;
    StrongChunk strong;  // of a strong chunk, after the rows have been read
  } stages[kStages];
  static_assert(sizeof(Stage) == sizeof(Rows128<Gate>), "chunks with strong gates take no more");
  float gates[kSubChunks][kGroupKeys];  // sums over each sub-chunk
  uint64_t full[kStages];               // the rows have arrived
  // Kept here, not in registers, while a strong chunk is finished.
  Item item, next;
  uint32_t phases;
  int first_strong_row;
};

// Starts the copies of an item's rows, if the item exists. `full` counts the copies; a wait for
// copy groups would also wait for the thread's bulk stores.
template <class Gate>
__device__ __forceinline__ void copy_item(Rows128<Gate>& to, uint64_t* full, const Problem& p,
                                          const Item& item) {
  if (!item.is_there(p)) return;
  const Chunk chunk = item.chunk(p);
  // address(row, part): the destination of 16-byte part `part` of a row
  const auto copy = [&](const Rows& r, auto* type, auto&& address) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kEach = 16 / sizeof(T), kVecs = kGroupKeys / kEach;
    constexpr int kRowsEach = kThreadsOfBlock / kVecs;
    const int thread = thread_index(), row = thread / kVecs, part = thread % kVecs;
    const bool inside = item.first + part * kEach < p.K;
    const T* from = rows_at<const T>(r, chunk) + token_offset(r, row) + item.first + part * kEach;
#pragma unroll
    for (int i = 0; i < kTile; i += kRowsEach, from += token_offset(r, kRowsEach))
      copy16(address(row + i, part), from, inside && row + i < chunk.length);
  };
  const auto tiles = [](Tile* first) {
    return [address = shared_address(first)](int row, int part) {
      return address + part / 8 * kTileBytes + swizzled(row, part % 8);
    };
  };
  copy(p.g, static_cast<Gate*>(nullptr), [address = shared_address(to.g)](int row, int part) {
    return address + row * static_cast<int>(kGroupKeys * sizeof(Gate)) + part * 16;
  });
  copy(p.q, static_cast<bf16*>(nullptr), tiles(to.group.q));
  copy(p.k, static_cast<bf16*>(nullptr), tiles(to.group.k));
  arrive_after_copies(full);
}

// Reads the channel pair's gates of a sub-chunk from shared memory.
template <class Gate>
__device__ __forceinline__ ChannelPairColumn<Gate> read_gates(const Gate* g,
                                                              const ChannelPair<kKeyTiles>& pair) {
  ChannelPairColumn<Gate> gates;
  using Word = typename ChannelPairColumn<Gate>::Word;
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i)
    gates.x[i] = *reinterpret_cast<const Word*>(g + (pair.first + i) * kGroupKeys + pair.channel);
  return gates;
}

// The word of a channel pair in the place of its gates.
template <class Gate>
__device__ __forceinline__ uint32_t& in_gates(Rows128<Gate>& s, const ChannelPair<kKeyTiles>& pair,
                                              int i) {
  return *reinterpret_cast<uint32_t*>(s.g + (pair.first + i) * kGroupKeys + pair.channel);
}

struct OutOfRange {
  int rows = 0;           // the chunk's rows from the thread's first that is out of range on
  bool channels = false;  // whether one of its channels is out of range
};

// Replaces q and k by q^ and k^ and sets the factors. Past alone, k^ of pairs with a channel out of
// range takes the place of their gates, and k 2^-b that of k.
//
// Gating (tiles/gating.cuh) does the same with warpgroup roles; here a thread has a channel pair in
// a sub-chunk, so that two blocks of 256 threads fit into 128 registers per thread, and fp32 gates
// are summed without splitting. gradients/chunk/operands.cuh does it from registers.
template <bool kPastAlone, class Gate>
__device__ __forceinline__ OutOfRange gate_rows(Rows128<Gate>& s,
                                                const ChannelPairColumn<Gate>& gates,
                                                const float (&sums)[kSubChunks][kGroupKeys],
                                                const ChannelPair<kKeyTiles>& pair, float scale) {
  auto [b, last] = cumsum(sums, pair);
  constexpr float kRange = kPastAlone ? kPastTierRange : kTierRange;
  const bool strong_x = !(fabsf(last.x) <= kRange), strong_y = !(fabsf(last.y) <= kRange);
  const auto references_of = [](float last, bool strong) {
    References r(last, strong);
    if (kPastAlone && !strong) r.from = r.to = 0.f;
    return r;
  };
  const References rx = references_of(last.x, strong_x), ry = references_of(last.y, strong_y);
  if (pair.sub_chunk == 0) {
    auto& factors = s.group.factors;
    pair_at(factors[kEnter], pair.channel) = make_float2(exp2_ftz(rx.from), exp2_ftz(ry.from));
    pair_at(factors[kMiddle], pair.channel) =
        make_float2(strong_x ? exp2_ftz(last.x) : 1.f, strong_y ? exp2_ftz(last.y) : 1.f);
    pair_at(factors[kLeave], pair.channel) = make_float2(strong_x ? 1.f : exp2_ftz(last.x - rx.to),
                                                         strong_y ? 1.f : exp2_ftz(last.y - ry.to));
    pair_at(factors[kSum], pair.channel) = last;
  }
  OutOfRange out{0, strong_x || strong_y};
  if (out.channels) out.rows = 1;  // b of the last row, summed in another order, may be in range
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) {
    b = b + to_log2(gates[i]);
    if constexpr (kPastAlone) {
      if (out_of_past_tier1(b.x) || out_of_past_tier1(b.y))
        out.rows = max(out.rows, kTile - pair.first - i);
    } else if (out_of_tier1(b.x, last.x) || out_of_tier1(b.y, last.y)) {
      out.rows = kTile;
    }
    const int at = pair.offset(pair.first + i);
    uint32_t &q = in_tile<uint32_t>(*s.group.q, at), &k = in_tile<uint32_t>(*s.group.k, at);
    const float2 q_pair = unpack(q), k_pair = unpack(k);
    q = pack(q_pair.x * scale * exp2_ftz(b.x - rx.from),
             q_pair.y * scale * exp2_ftz(b.y - ry.from));
    k = pack(k_pair.x * exp2_ftz(rx.to - b.x), k_pair.y * exp2_ftz(ry.to - b.y));
    if (kPastAlone && out.channels) {
      in_gates(s, pair, i) = k;
      k = pack(k_pair.x * exp2_ftz(-b.x), k_pair.y * exp2_ftz(-b.y));
    }
  }
  return out;
}

// Replaces k 2^-b of channel pairs out of range by k^.
template <class Gate>
__device__ __forceinline__ void take_keys_of_state(Rows128<Gate>& s) {
  const ChannelPair<kKeyTiles> pair;
  const float2 last = pair_at(s.group.factors[kSum], pair.channel);
  if (!out_of_past_tier1(last.x) && !out_of_past_tier1(last.y)) return;
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i)
    in_tile<uint32_t>(*s.group.k, pair.offset(pair.first + i)) = in_gates(s, pair, i);
}

template <class Gate, bool kPastAlone>
__global__ void __launch_bounds__(kThreadsOfBlock, kBlocksEach) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  const bool with_A = p.with_A;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& shared = *reinterpret_cast<Shared<Gate>*>(s_bytes);
  constexpr bool kAhead = Shared<Gate>::kStages == 2;
  const auto stores = [] { return thread_index() == 0; };
  Item item = Item::first_of_block(p);
  if (stores())
    for (uint64_t& barrier : shared.full) init_barrier(&barrier, kThreadsOfBlock);
  __syncthreads();      // the barriers are initialized
  uint32_t phases = 0;  // of the barriers, one bit each
  const auto wait_for_rows = [&](int stage) {
    wait(&shared.full[stage], phases >> stage & 1);
    phases ^= 1u << stage;
  };
  if (kAhead) copy_item(shared.stages[0].rows, &shared.full[0], p, item);
  float A[32 / kKeyTiles];
  clear(A);
  int strong = 0;  // how many of the chunk's last rows are
#pragma unroll 1
  for (int stage = 0; item.is_there(p); stage = kAhead ? 1 - stage : 0) {
    auto& rows = shared.stages[stage].rows;
    if (!kAhead) copy_item(rows, &shared.full[0], p, item);
    wait_for_rows(stage);
    const ChannelPair<kKeyTiles> pair;
    const ChannelPairColumn<Gate> gates = read_gates(rows.g, pair);
    sum_gates(shared.gates, gates, pair);
    if (kAhead && stores()) wait_for_bulk_stores();
    __syncthreads();  // the sums are written; the previous item is read
    Item next = item.next(p);
    if constexpr (kAhead)
      copy_item(shared.stages[1 - stage].rows, &shared.full[1 - stage], p, next);
    const OutOfRange out_of_range = gate_rows<kPastAlone>(rows, gates, shared.gates, pair, p.scale);
    strong = max(strong, out_of_range.rows);
    fence_for_products();  // also for bulk stores
    bool keys_later = false;
    if constexpr (kPastAlone)
      keys_later = __syncthreads_or(out_of_range.channels);
    else
      __syncthreads();  // q^, k^ and the factors are written, the gates are read
    unsigned char* out = prepared_at(p, item.index, item.first / kGroupKeys);
    const auto store_group = [&] {
      if (!stores()) return;
      if (has_second_tile(p, item.first)) {
        bulk_store(out, &rows.group, sizeof(KeyGroup));
      } else {  // one tile of q^ and one of k^
        bulk_store(out, rows.group.q, kTileBytes);
        bulk_store(out + offsetof(KeyGroup, factors), rows.group.factors,
                   kFactorBytes + kTileBytes);
      }
      commit_bulk_stores();
    };
    if (!keys_later) store_group();
    if (with_A) {
      const Place at;
      begin_products();
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
        mma_ABt(A, rows.group.q[i],
                Operand(rows.group.k[i]).from_row(at.group * (kTile / kKeyTiles)));
      commit_products();
      wait_for_products<0>();
    }
    if (keys_later) {
      __syncthreads();  // k 2^-b is read
      take_keys_of_state(rows);
      fence_for_products();
      __syncthreads();  // k^ is written
      store_group();
    }
    if (item.is_last_of_chunk(p)) {
      if (__syncthreads_or(strong > 0)) strong = kPastAlone ? largest_of_block(strong) : kTile;
      out += sizeof(KeyGroup);
      if (stores()) {
        *reinterpret_cast<uint64_t*>(p.tiers + item.index * kMaxTierBlocks) = strong;
        if (with_A)  // 16 bytes are copied, so all 16 are written
          *reinterpret_cast<int4*>(out + kTileBytes) = make_int4(strong, 0, 0, 0);
      }
      if (strong) {
        // A strong chunk always uses the first stage, so that its addresses are constants. Rows of
        // the next item that have been copied into it are copied again later.
        if (kAhead && next.is_there(p)) wait_for_rows(1 - stage);
        if (stores()) {
          wait_for_bulk_stores();
          shared.item = item;
          shared.next = next;
          shared.phases = phases;
          if (kPastAlone) shared.first_strong_row = kTile - strong;
        }
        if constexpr (kPastAlone) store_scores(*reinterpret_cast<Tile*>(out), A);
        __syncthreads();  // the rows are read; A is written, whose strong rows are written again
        StrongChunk& strong_chunk = shared.stages[0].strong;
        const auto find = [&] { return shared.item.chunk(p); };
        finish_scores(strong_chunk.scores, p, find(), kPastAlone ? shared.first_strong_row : 0);
        if (p.dq_intra.data != nullptr) {
          __syncthreads();  // A is read
          strong_chunk.finish_gradients(p, find);
        }
        __syncthreads();  // the strong chunk's tiles are read
        next = shared.next;
        phases = shared.phases;
        if constexpr (kAhead) copy_item(shared.stages[1].rows, &shared.full[1], p, next);
        stage = 0;
      } else if (with_A) {
        store_scores(rows.A(), A);
        fence_for_products();
        __syncthreads();  // A is written
        if (stores()) {
          bulk_store(out, &rows.A(), kTileBytes);
          commit_bulk_stores();
        }
      }
      clear(A);
      strong = 0;
    }
    if (!kAhead) {
      if (stores()) wait_for_bulk_stores();
      __syncthreads();  // the rows are read
    }
    item = next;
  }
  if (stores()) wait_for_bulk_stores();  // the block must not end earlier
#endif
}

template <class Gate, bool kPastAlone>
void launch(const Problem& p, cudaStream_t stream) {
  constexpr auto kKernel = kernel<Gate, kPastAlone>;
  static const DynamicShared shared(kKernel, sizeof(Shared<Gate>));
  // An odd number, so that a block's chunks come from different heads: one slow head then loads all
  // blocks equally.
  const int64_t blocks = std::min<int64_t>(chunk_heads(p), kBlocksEach * p.processors - 1);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kKernel, blocks, kThreadsOfBlock, sizeof(Shared<Gate>), stream, p);
}

template <bool kPastAlone>
void launch(const Problem& p, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    launch<float, kPastAlone>(p, stream);
  else
    launch<bf16, kPastAlone>(p, stream);
}

}  // namespace prepare

void launch_prepare(const Problem& p, cudaStream_t stream) {
  launch_prepare_without_A(told(p, &Problem::with_A), stream);
}

void launch_prepare_without_A(const Problem& p, cudaStream_t stream) {
  if (p.past_alone)
    prepare::launch<true>(p, stream);
  else
    prepare::launch<false>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
