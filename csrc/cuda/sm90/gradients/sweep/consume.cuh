// gradients/sweep: the gradients of a chunk, made by a consumer.
#pragma once

#include "cuda/sm90/gradients/common/gates.cuh"
#include "cuda/sm90/gradients/common/results.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::gradients::sweep {

// Sums the contribution to dg of k through the states that leave the chunk.
__device__ __forceinline__ void sum_inter(Queries& queries, int rank, const float (&y)[32],
                                          const Tile& k) {
  const int thread = thread_index() % kGroupThreads;
  const Fragments fragments(thread);
  float sums[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t words[4];
    fragments.load(words, k, i);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * i + 4 * j + 2 * e;
        sum = sum + unpack(words[2 * j + e]) * make_float2(y[at], y[at + 1]);
      }
      sums[4 * i + 2 * j] = sum.x;
      sums[4 * i + 2 * j + 1] = sum.y;
    }
  }
  // Now lane 4 g + t has pair t of the g-th eight columns, summed over the warp's rows.
  fold_rows<4>(sums);
  fold_rows<2>(sums);
  fold_rows<1>(sums);
  pair_at(queries.inter(rank, thread / kWarp), thread % kWarp / 4 * 8 + thread % 4 * 2) =
      make_float2(sums[0], sums[1]);
}

// Stores dA with zeros above the diagonal.
__device__ __forceinline__ void store_score_grads(Tile& tile, float (&dA)[32]) {
  const Lane lane;
#pragma unroll
  for (int j = 0; j < 32; ++j)
    dA[j] = j / 4 * 8 + 2 * lane.t + j % 2 <= lane.row + j / 2 % 2 * 8 ? dA[j] : 0.f;
  store_tile(tile, dA);
}

// A consumer's references to its chunk, number i of the sweep. It is made again in each round, so
// that the addresses derived from it take no registers in between.
template <class SharedOfKernel>
struct OwnChunk {
  const int i, self, role, chunk;
  const uint32_t parity;  // of barriers that complete one phase per chunk of this consumer
  Own<typename SharedOfKernel::Gate>& own;
  Queries& queries;
  Keys& keys;

  __device__ __forceinline__ OwnChunk(SharedOfKernel& s, int number)
      : i(number),
        self(i % kConsumers),
        role(kConsumer + self),
        chunk(chunk_of(s.segment, i)),
        parity(i / kConsumers & 1),
        own(s.own[self]),
        queries(s.queries[i % kQueryStages]),
        keys(s.keys[self]) {}
};

// A consumer's work on every other chunk. First come the sums over the values. Then a strong chunk
// gets all its gradients from these sums; another chunk first adds the contributions of token
// pairs, then gets its gradients.
template <int kSlices, class SharedOfKernel>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(SharedOfKernel& s, const Problem& p, int rank)
      : s_(s), p_(p), rank_(rank), part_(p, s.segment, rank) {}

  __device__ __forceinline__ void run(int consumer) {
    if (consumer > 0) skip();
    if (loads_) {
      load_queries(s_, p_, consumer, rank_);
      load_keys(s_, p_, consumer);
      if (consumer == 0) load_queries(s_, p_, kConsumers, rank_);
    }
    if constexpr (kByProducts)
      part_.copy(s_.own[consumer], consumer);
    else
      gates_ = part_.load(consumer);
#pragma unroll 1
    for (int i = consumer; i < s_.segment.chunks; i += kConsumers) {
      const Chunk c(s_, i);
      wait(&s_.queries_full[i % kQueryStages], i / kQueryStages & 1);
      const bool strong = __any_sync(0xffffffffu, s_.strong[i % kQueryStages].x);
      if constexpr (!kByProducts)
        part_.write_exponents(c.own, float_tile(c.own.tiles), gates_, c.queries, rank_, c.chunk,
                              c.role);
      // This chunk's phases of the slices' barriers begin only when the other consumer has left its
      // slices.
      if (i > 0) wait(&s_.turn[c.self], (i - 1) / kConsumers & 1);
      float x[32], y[32], dA[32];
      clear(x);
      clear(y);
      clear(dA);
      sum_values(c, x, y, dA);
      skip();  // the slices of the other consumer's chunk
      if (strong) {
        write_strong_gradients(c, x, y);
        continue;
      }
      float exponents[32];
      add_pairs(c, x, y, dA, exponents);
      write_gradients(c, x, y, exponents);
    }
  }

 private:
  using Gate = typename SharedOfKernel::Gate;
  using Chunk = OwnChunk<SharedOfKernel>;
  static constexpr bool kByProducts = GatePart<Gate>::kByProducts;

  __device__ __forceinline__ void skip() {
    slice_.template skip<kSlices>();
    state_.template skip<kSlices>();
  }

  // x = do S~^T, y = v dS~^T, dA = do v^T; also dv of this block's slices.
  __device__ __forceinline__ void sum_values(const Chunk& c, float (&x)[32], float (&y)[32],
                                             float (&dA)[32]) {
#pragma unroll 1
    for (int j = 0; j < kSlices; ++j, slice_.next(), state_.next()) {
      const Slice& values = s_.slices[slice_.stage];
      const Tile& dS = s_.dS[state_.stage];
      wait(&s_.full[slice_.stage], slice_.parity);
      fence_for_products();  // for the copies
      const uint64_t d_o = descriptor(values.d_o), S_and_v = descriptor(values.S);
      begin_products();
      multiply_two(x, dA, d_o, S_and_v);
      commit_products();
      wait(&s_.ready[state_.stage], state_.parity);
      begin_products();
      mma_ABt(y, values.v, dS);
      commit_products();
      const bool is_own = j % kClusterBlocks == rank_;
      const auto leave = [&] {
        wait_for_products<0>();
        arrive_as_warp(&s_.empty[slice_.stage]);
        arrive_as_warp(&s_.taken[state_.stage]);
        if (is_own) arrive_as_warp(&s_.taken[state_.stage]);  // dS~ was not sent
        if (j + 1 == kSlices) arrive_as_warp(&s_.turn[kConsumers - 1 - c.self]);
      };
      if (!is_own) {
        leave();
        continue;
      }
      wait(&s_.keys_full[c.self], c.parity);
      const int place = received_place<kSlices>(c.i, j);
      wait(&s_.received_full[place], received_parity<kSlices>(c.i));
      Tile& tile = s_.received[place];
      const Operand other = tile, mine = dS;
      float dv[32];
      clear(dv);
      begin_products();
      mma_AtB(dv, c.keys.A, values.d_o);
      mma_AB(dv, c.keys.k[0], rank_ == 0 ? mine : other);
      mma_AB(dv, c.keys.k[1], rank_ == 0 ? other : mine);
      commit_products();
      leave();
      role_barrier(c.role);  // the products of all warps have read the received dS~
      store_tile(tile, dv);
      TileRows rows;
      rows.read(tile);
      // The tile that the other block's next bulk copy will overwrite has been read. This fence
      // covers all earlier reads, so the arrival below also tells the other block about them; the
      // arrival alone, which has this block's scope, would not.
      fence_for_products();
      __syncwarp();
      if (threadIdx.x % kWarp == 0)
        arrive_in_cluster(address_in(&s_.taken[state_.stage], 1 - rank_));
      rows.write(p_.dv, s_.segment, c.chunk, j * kTile, p_.V);
    }
  }

  // Writes a strong chunk's gradients from the sums over values. The contributions of token pairs
  // are in memory.
  __device__ __forceinline__ void write_strong_gradients(const Chunk& c, const float (&x)[32],
                                                         const float (&y)[32]) {
    wait(&s_.states_full[c.i % kQueryStages], c.i / kQueryStages & 1);
    const FloatTile k_terms = float_tile(c.keys.k), q_terms = part_.q_terms(c.own, c.keys.A);
    if constexpr (kByProducts) {
      wait_for_copies<0>();
      part_.write_exponents(c.own, q_terms, part_.load(c.i), c.queries, rank_, c.chunk, c.role);
    } else {
      gates_ = part_.load(c.i + kConsumers);
    }
    role_barrier(c.role);  // k^ is read
    part_.write_strong_exponents(c.own, k_terms, c.queries, rank_, c.chunk);
    role_barrier(c.role);  // the exponents are written
    finish_strong(x, q_terms, p_.scale);
    finish_strong(y, k_terms, 1.f);
    role_barrier(c.role);  // dq and dk are written
    part_.write_strong_gradients(c.own, q_terms, k_terms, c.queries, rank_, c.chunk, c.role);
    release(c);
    if constexpr (kByProducts) part_.copy(c.own, c.i + kConsumers);
  }

  // x += dA k^, y += dA^T q^. While these run, makes the exponents of dq and dk, and sums the
  // states' contribution to dg.
  __device__ __forceinline__ void add_pairs(const Chunk& c, float (&x)[32], float (&y)[32],
                                            float (&dA)[32], float (&exponents)[32]) {
    sum_inter(c.queries, rank_, y, c.keys.k[rank_]);
    store_score_grads(c.keys.A, dA);  // A is read
    if constexpr (kByProducts)
      wait_for_copies<0>();  // gates
    else
      part_.read_exponents(exponents, c.own);
    fence_for_products();
    role_barrier(c.role);  // dA, gates and sum_inter's sums are written, or exponents read
    begin_products();
    if constexpr (kByProducts) {
      Triangle<Ones::kUpTo>(thread_index()).sum(exponents, c.own.tiles[0], false);
      commit_products();
    }
    mma_AB(x, c.keys.A, c.keys.k[rank_]);
    mma_AtB(y, c.keys.A, c.queries.q);
    commit_products();
    wait(&s_.states_full[c.i % kQueryStages], c.i / kQueryStages & 1);
    part_.sum_states(c.own, c.queries, rank_);
    if constexpr (kByProducts) {
      wait_for_products<1>();
      part_.make_exponents(exponents, c.queries, rank_);
    }
    wait_for_products<0>();
    role_barrier(c.role);  // dA, q^, k^ and gates are read
  }

  // Writes dq and dk from x and y, and dg from the sums of q^ x - k^ y. The results overwrite
  // operands that have been read.
  __device__ __forceinline__ void write_gradients(const Chunk& c, const float (&x)[32],
                                                  const float (&y)[32],
                                                  const float (&exponents)[32]) {
    const GradientTiles tiles{c.keys.A, c.keys.k[rank_], c.queries.q, c.keys.k[1 - rank_]};
    finish(tiles, x, y, exponents, c.queries.q, c.keys.k[rank_], p_.scale);
    fence_for_products();
    role_barrier(c.role);  // the terms of dg are written
    float dg[32];
    part_.load_states(dg, c.own);
    begin_products();
    const Triangle<Ones::kFrom> ones(thread_index());
    ones.sum(dg, tiles.high, true);
    ones.sum(dg, tiles.low, true);
    commit_products();
    TileRows dq_rows, dk_rows, dg_rows;
    dq_rows.read(tiles.dq);
    dk_rows.read(tiles.dk);
    wait_for_products<0>();
    if constexpr (kByProducts) {
      store_tile(c.own.tiles[0], dg);
      dg_rows.read(c.own.tiles[0]);
    }
    release(c);
    if constexpr (kByProducts)
      part_.copy(c.own, c.i + kConsumers);
    else
      gates_ = part_.load(c.i + kConsumers);
    dq_rows.write(p_.dq, s_.segment, c.chunk, rank_ * kTile, p_.K);
    dk_rows.write(p_.dk, s_.segment, c.chunk, rank_ * kTile, p_.K);
    if constexpr (kByProducts)
      dg_rows.write(p_.dg, s_.segment, c.chunk, rank_ * kTile, p_.K);
    else
      part_.write(dg, c.chunk);
  }

  // Releases a chunk's places and starts the copies of the next chunk's operands.
  __device__ __forceinline__ void release(const Chunk& c) {
    fence_for_products();  // before the next chunks' bulk copies
    arrive(&s_.chunk_empty[c.self]);
    if (loads_) {
      wait(&s_.chunk_empty[c.self], c.parity);
      load_keys(s_, p_, c.i + kConsumers);
      load_queries(s_, p_, c.i + kQueryStages, rank_);
    }
    __syncwarp();
  }

  SharedOfKernel& s_;
  const Problem& p_;
  const int rank_;
  const GatePart<Gate> part_;
  const bool loads_ = threadIdx.x % kGroupThreads == 0;
  Ring<SharedOfKernel::kSliceStages> slice_;
  Ring<kStateStages> state_;
  ChannelPairColumn<Gate> gates_;  // gates that are not summed by products
};

}  // namespace gla_ext::cuda::sm90::gradients::sweep
