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

// Replaces q and k by q^ and k^ and sets the factors. Returns whether a channel is out of range.
// Gating (tiles/gating.cuh) does the same with warpgroup roles; here a thread has a channel pair in
// a sub-chunk, so that two blocks of 256 threads fit into 128 registers per thread, and fp32 gates
// are summed without splitting. gradients/chunk/operands.cuh does it from registers.
template <class Gate>
__device__ __forceinline__ bool gate_rows(Rows128<Gate>& s, const ChannelPairColumn<Gate>& gates,
                                          const float (&sums)[kSubChunks][kGroupKeys],
                                          const ChannelPair<kKeyTiles>& pair, float scale) {
  auto [b, last] = cumsum(sums, pair);
  const bool strong_x = !(fabsf(last.x) <= kTierRange), strong_y = !(fabsf(last.y) <= kTierRange);
  const References rx(last.x, strong_x), ry(last.y, strong_y);
  if (pair.sub_chunk == 0) {
    auto& factors = s.group.factors;
    pair_at(factors[kEnter], pair.channel) = make_float2(exp2_ftz(rx.from), exp2_ftz(ry.from));
    pair_at(factors[kMiddle], pair.channel) =
        make_float2(strong_x ? exp2_ftz(last.x) : 1.f, strong_y ? exp2_ftz(last.y) : 1.f);
    pair_at(factors[kLeave], pair.channel) = make_float2(strong_x ? 1.f : exp2_ftz(last.x - rx.to),
                                                         strong_y ? 1.f : exp2_ftz(last.y - ry.to));
    pair_at(factors[kSum], pair.channel) = last;
  }
  bool out = false;
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) {
    b = b + to_log2(gates[i]);
    out |= out_of_tier1(b.x, last.x) || out_of_tier1(b.y, last.y);
    const int at = pair.offset(pair.first + i);
    uint32_t &q = in_tile<uint32_t>(*s.group.q, at), &k = in_tile<uint32_t>(*s.group.k, at);
    const float2 q_pair = unpack(q), k_pair = unpack(k);
    q = pack(q_pair.x * scale * exp2_ftz(b.x - rx.from),
             q_pair.y * scale * exp2_ftz(b.y - ry.from));
    k = pack(k_pair.x * exp2_ftz(rx.to - b.x), k_pair.y * exp2_ftz(ry.to - b.y));
  }
  return out;
}

template <class Gate>
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
  bool strong = false;
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
    strong |= gate_rows(rows, gates, shared.gates, pair, p.scale);
    fence_for_products();  // also for bulk stores
    __syncthreads();       // q^, k^ and the factors are written, the gates are read
    unsigned char* out = prepared_at(p, item.index, item.first / kGroupKeys);
    if (stores()) {
      if (has_second_tile(p, item.first)) {
        bulk_store(out, &rows.group, sizeof(KeyGroup));
      } else {  // one tile of q^ and one of k^
        bulk_store(out, rows.group.q, kTileBytes);
        bulk_store(out + offsetof(KeyGroup, factors), rows.group.factors,
                   kFactorBytes + kTileBytes);
      }
      commit_bulk_stores();
    }
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
    if (item.is_last_of_chunk(p)) {
      strong = __syncthreads_or(strong);
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
        }
        __syncthreads();  // the rows are read
        StrongChunk& strong_chunk = shared.stages[0].strong;
        const auto find = [&] { return shared.item.chunk(p); };
        finish_scores(strong_chunk.scores, p, find());
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
      strong = false;
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

template <class Gate>
void launch(const Problem& p, cudaStream_t stream) {
  static const DynamicShared shared(kernel<Gate>, sizeof(Shared<Gate>));
  // An odd number, so that a block's chunks come from different heads: one slow head then loads all
  // blocks equally.
  const int64_t blocks = std::min<int64_t>(chunk_heads(p), kBlocksEach * p.processors - 1);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kernel<Gate>, blocks, kThreadsOfBlock, sizeof(Shared<Gate>), stream, p);
}

}  // namespace prepare

void launch_prepare(const Problem& p, cudaStream_t stream) {
  launch_prepare_without_A(told(p, &Problem::with_A), stream);
}

void launch_prepare_without_A(const Problem& p, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    prepare::launch<float>(p, stream);
  else
    prepare::launch<bf16>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
