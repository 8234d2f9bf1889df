// gradients/chunk for K above 128, by chunk pairs: two neighbouring chunks share one S and one dS,
// so half as many states are written and read. With S~ of the first chunk and dS~ of the second, p
// = 2^(b_C - to) of the first times 2^from of the second, and m1, m2 the middle factors of a state
// in the two chunks (1; 2^b_C out of range):
//
//   do2 S~2^T  = p (m1 do2 S~1^T + (do2 v1^T) k^1)      dS~ of the first likewise:
//   v1 dS~1^T  = p (m2 v1 dS~2^T + (v1 do2^T) q^2)      k^1 dS~1 = (p m2 k^1) dS~2 + A21^T do2
//   A21 = q^2 (p k^1)^T
//   rowsum(S~1 dS~1) = p (m2 rowsum(S~1 dS~2) + sum_t q^2_t (do2 S~1^T)_t)
//   rowsum(S~2 dS~2) = p (m1 rowsum(S~1 dS~2) + sum_t k^1_t (v1 dS~2^T)_t)
//
// grid    (row, pair of entries, head, chunk of the pair), clusters of two blocks; four warpgroups
// reads   as gradients/chunk over prepared chunks, which have A; also q^ or k^, and do or v, of the
//         other chunk
// writes  dq, dk, dg [B, T, H, K], dv [B, T, H, V]
//
// The two blocks send each other their sums over tokens and their halves of rowsum(S~1 dS~2). A
// chunk without a partner is computed as in gradients/chunk. Accumulation, b and dg are fp32; 64
// values at a time.
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/gradients/chunk/chunk.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "pair.cuh"

namespace gla_ext::cuda::sm90 {
namespace gradients::chunk_pair {

constexpr int kGroups = 4;  // warpgroups of a block

template <int kTiles>
struct PairAccumulators : Accumulators<kTiles> {
  static_assert(kGroupsFor<kTiles> == kGroups);
  // Half of the columns of dA. In warpgroups that make y: of do2 v1^T, or in the first chunk of v1
  // do2^T.
  float scores[kTile / 4];
  __device__ __forceinline__ PairAccumulators() { clear(scores); }
};

// Scales k^. A thread has eight neighbouring key channels of every 16th token.
class KeyScaler {
 public:
  __device__ __forceinline__ KeyScaler()
      : channel_(thread_index() % kVecs * 8), token_(thread_index() / kVecs) {}
  __device__ __forceinline__ int channel() const { return channel_; }
  template <int kTiles>
  __device__ __forceinline__ void scale(Tile (&tiles)[kTiles], const float (&by)[8]) const {
    if (kHasAbsent<kTiles> && channel_ >= kTiles * kTile) return;
#pragma unroll
    for (int token = 0; token < kTile; token += kTokens) {
      uint4& at =
          in_tile<uint4>(tiles[channel_ / kTile], swizzled(token_ + token, channel_ % kTile / 8));
      uint32_t words[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack(words[i]);
        words[i] = pack(x.x * by[2 * i], x.y * by[2 * i + 1]);
      }
      at = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

 private:
  static constexpr int kVecs = kGroups * kTile / 8, kTokens = kGroups * kGroupThreads / kVecs;
  int channel_, token_;
};

// For the first chunk: makes A21, the scores of the second chunk's queries with this chunk's keys,
// and replaces k^ by p m2 k^.
template <int kTiles>
__device__ __forceinline__ void scores_of_pair(PairShared<kTiles>& s, const Problem& p,
                                               bool second_strong) {
  constexpr int kN = 32 / kGroups;
  const Place at;
  const KeyScaler keys;
  float by[8];
#pragma unroll
  for (int e = 0; e < 8; ++e)
    by[e] = s.factors().leave[keys.channel() + e] * s.factors().enter[keys.channel() + e];
  keys.scale(s.k, by);
  fence_for_products();
  __syncthreads();  // p k^ is written
  float A[kN];
  clear(A);
  begin_products();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    mma_ABt(A, s.states(kTile).S[i], Operand(s.k[i]).from_row(at.group * 2 * kN));
  commit_products();
  wait_for_products<0>();
  store_columns(s.pair_scores(), A);
  if (!second_strong) return;
  const float* middle = factors_at(p, s.other_entry(p), kMiddle, keys.channel());
#pragma unroll
  for (int e = 0; e < 8; ++e) by[e] = middle[e];
  __syncthreads();  // p k^ is read
  keys.scale(s.k, by);
}

// Computes everything that is summed over values: dv; do and v times the states; do times v of the
// other chunk, or v times its do; half of rowsum(S~ dS~).
template <int kTiles>
__device__ __forceinline__ void multiply_pair_values(PairAccumulators<kTiles>& acc,
                                                     PairShared<kTiles>& s, const Problem& p,
                                                     bool is_first) {
  constexpr int kValues = 32;
  float sum = 0;  // sum over the states
  LaneRows<kValues> dv_rows;
  const auto write_dv = [&](int first) {
    const int column = first + thread_index() / kGroupThreads * 32 % kTile;
    dv_rows.write_rows(s.bases.dv + column, token_offset(p.dv, 1), s.chunk.length, p.V - column);
  };
#pragma unroll 1
  for (int first = 0; first < p.V; first += kTile) {
    wait_for_copies<0>();
    s.wait_for_states(first);
    fence_for_products();  // for copies, and before bulk copies over states that were read
    __syncthreads();       // values, states and A have arrived; earlier ones are read
    if (first + kTile < p.V)
      copy_pair_values(s, p, s.chunk, s.bases, s.other_values, s.other_length, is_first,
                       first + kTile);
    else
      copy_operands_of_pair(s, p, s.states(first + kTile));
    const auto& states = s.states(first);
    const auto& values = s.values(first);
    const Operand S = states.S[0], dS = states.dS[0], d_o = values.d_o, v = values.v;
    const Operand other = s.other(first);
    const Part<kTiles> part;
    const auto multiply_all = [&](auto makes_dv, auto two) {
      const int column = part.half() * kValues;
      float dv[kValues / 2];
      clear(dv);
      begin_products();
      acc.multiply_states(part, two, d_o, v, S, dS);
      mma_ABt(acc.scores, part.makes_x() || !is_first ? d_o : v,
              (part.makes_x() ? v : other).from_row(part.half() * 32));
      if constexpr (makes_dv) {
        mma_AtB(dv, s.A, d_o.from_column(column));
        if (is_first) mma_AtB(dv, s.pair_scores(), other.from_column(column));
#pragma unroll
        for (int i = 0; i < kTiles; ++i) mma_AB(dv, s.k[i], dS.from_tile(i).from_column(column));
      }
      commit_products();
      if constexpr (!makes_dv)
        if (first > 0) write_dv(first - kTile);
      if ((first / kTile % 2 == 0) == is_first) add_states<kTiles>(sum, states);
      wait_for_products<0>();
      if constexpr (makes_dv) dv_rows = LaneRows<kValues>(dv);
    };
    part.by_width([&](auto two) {
      if ((first / kTile % 2 == 0) != part.makes_x())
        multiply_all(std::false_type{}, two);
      else
        multiply_all(std::true_type{}, two);
    });
    commit_copies();
  }
  const int last = (p.V - 1) / kTile;
  if (last % 2 == thread_index() / kGroupThreads / 2) write_dv(last * kTile);
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  __syncthreads();  // all operands are read
  if (thread_index() % 2 == 0) s.sums().states[thread_index() / 2] = sum;
}

template <class Gate, int kTiles>
__device__ __forceinline__ void make_pair_gradients(PairShared<kTiles>& s, const Problem& p,
                                                    const ChunkOfPair& pair_chunk) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  arrive_at_cluster();  // waited for before writing to the other block's memory
  const bool is_first = pair_chunk.role == Role::kFirst;
  const bool strong = __any_sync(0xffffffffu, !in_tier1(p, pair_chunk.chunk));
  Chunk other_chunk = pair_chunk.chunk;
  other_chunk.entry = other_entry(p, pair_chunk.chunk, is_first);
  const bool other_strong = __any_sync(0xffffffffu, !in_tier1(p, other_chunk));
  load_pair_operands(s, p, pair_chunk);
  fence_for_products();
  __syncthreads();  // the operands and the factors have arrived
  if (thread_index() < s.kChannels)
    s.pass[thread_index()] = s.factors().leave[thread_index()] * s.factors().enter[thread_index()];
  if (is_first) scores_of_pair(s, p, other_strong);
  PairAccumulators<kTiles> acc;
  multiply_pair_values(acc, s, p, is_first);

  // The tiles of the last states are free. The buffer of states next to them holds q^2 and k^1.
  auto& tiles = s.states(p.V - 1).S;
  auto& operands = s.states(p.V - 1 + kTile);
  auto &other_operand = operands.S, &own_operand = operands.dS;
  auto& to_send = s.sums().dg;
  copy_operand(s.q, p, s.chunk.entry, /*keys=*/false);
  commit_copies();
  const Part<kTiles> part;
  if (!part.makes_x())
    store_columns(tiles[1], acc.scores, part.half());
  else if (!strong)
    store_scores(tiles[0], acc.scores, part.half());
  wait_for_copies<1>();  // all but q^
  fence_for_products();
  __syncthreads();                   // the pair's scores and operands are ready
  if (part.makes_x() != is_first) {  // products with the other chunk's state
    acc.for_tiles([&](float (&d)[32], bool, int tile) {
      sum_tokens<kTiles>(to_send, is_first ? s.k : own_operand, d, tile);
      if (other_strong)
        scale_columns(d, factors_at(p, s.other_entry(p), kMiddle, tile * kTile) + 2 * Place().t);
    });
    part.by_width([&](auto two) {
      begin_products();
      acc.template multiply_tiles<kSummed, kOther>(two, tiles[1], other_operand[part.tile()]);
      commit_products();
      wait_for_products<0>();
    });
    acc.for_tiles([&](float (&d)[32], bool, int tile) {
      scale_columns(d, s.pass + tile * kTile + 2 * Place().t);
    });
  }
  sum_inter<kTiles>(s, is_first ? own_operand : s.k, acc);
  const ChannelPair<kGroups> pair;
  const ChannelPairColumn<Gate> gates(p.g, p, s.chunk, pair.first, pair.channel);
  wait_for_copies<0>();  // q^ has arrived
  fence_for_products();
  wait_for_cluster();         // the other block has started
  __syncthreads();            // and the sums to send are written
  if (is_first && !strong) {  // k^ again, unscaled, for the sums of dg
    copy_operand(s.k, p, s.chunk.entry, /*keys=*/true);
    commit_copies();
  }
  const int thread = thread_index();
  constexpr int kKeys = kTiles * kTile;
  if (thread < kKeys) {
    const float own = strong ? *factors_at(p, s.chunk.entry, kMiddle, thread) : 1.f;
    const float other = other_strong ? *factors_at(p, s.other_entry(p), kMiddle, thread) : 1.f;
    float& states = s.sums().states[thread];
    states *= own * s.pass[thread] * other;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kSubChunks; ++warp) sum += to_send[warp][thread];
    if (!is_first) sum *= other * s.pass[thread];  // those of the first chunk are made of p m2 k^
    store_in_cluster(address_in(&s.other_sums[thread], is_first), states + sum);
  }
  arrive_at_cluster();
  if (!strong) acc.multiply_scores(tiles[0], is_first ? own_operand : s.k, s.q);
  sum_gates(s.sums().gates, gates, pair);
  __syncthreads();  // the scores are read: x and y take their place
  store_accumulators<kTiles>(s.gradients, acc);
  wait_for_copies<0>();  // k^ has arrived again
  wait_for_cluster();    // the other block's sums have arrived
  if (thread < kKeys) s.sums().states[thread] += s.other_sums[thread];
  __syncthreads();  // x, y and all sums but dg's are written
  if (strong)
    write_gradients<true, false, Gate, kTiles>(s, gates, p);
  else
    write_gradients<false, false, Gate, kTiles>(s, gates, p);
}

template <class Gate, int kTiles>
__global__ void __launch_bounds__(kGroups* kGroupThreads, 1) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<PairShared<kTiles>*>(s_bytes);
  const ChunkOfPair pair = find_chunk_of_pair(p, blockIdx.x);
  if (pair.chunk.length == 0) return;
  if (pair.chunk.tail) return clear_gradients<Gate, kTiles>(p, pair.chunk);
  if (pair.role == Role::kAlone)
    make_gradients<Gate, kTiles>(s, p, pair.chunk);
  else
    make_pair_gradients<Gate>(s, p, pair);
#endif
}

template <class Gate, int kTiles>
void launch(const Problem& p, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(PairShared<kTiles>);
  static_assert(fits_multiprocessor(1, kSharedBytes));
  static const DynamicShared shared(kernel<Gate, kTiles>, kSharedBytes);
  const int64_t blocks = chunk_pair_blocks(p);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent<2>(kernel<Gate, kTiles>, blocks, kGroups * kGroupThreads, kSharedBytes, stream,
                      p);
}

template <class Gate>
void launch(const Problem& p, cudaStream_t stream) {
  if (p.K <= 3 * kTile)
    launch<Gate, 3>(p, stream);
  else
    launch<Gate, 4>(p, stream);
}

}  // namespace gradients::chunk_pair

void launch_gradients_chunk_pair(const Problem& p, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    gradients::chunk_pair::launch<float>(p, stream);
  else
    gradients::chunk_pair::launch<bf16>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
