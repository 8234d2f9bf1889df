// Small kernels that do something right, and the same with one thing wrong that a GPU might let
// pass: what the emulator must see. Tested by tests/tools/test_emulator.py.
#include "cuda/sm90/tiles/cluster.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"

using namespace gla_ext::cuda::sm90;

namespace {

extern __shared__ __align__(1024) unsigned char s_bytes[];

__device__ float* floats() { return reinterpret_cast<float*>(s_bytes); }
__device__ bool first() { return threadIdx.x == 0; }

// A tile of ones as products read them, by all threads.
__device__ void write_ones(unsigned char* tile) {
  for (int i = threadIdx.x; i < 64 * 64 / 2; i += blockDim.x)
    reinterpret_cast<uint32_t*>(tile)[i] = 0x3f803f80;
}
// Both tiles of ones. Products may read them only behind a fence.
__device__ void write_tiles(bool fenced) {
  write_ones(s_bytes);
  write_ones(s_bytes + 8192);
  if (fenced) fence_for_products();
  __syncthreads();
}
// One product of two tiles; the result is 16 everywhere.
__device__ void begin_product(float (&d)[32]) {
  begin_products();
  product<Contiguous::kSummed, Contiguous::kSummed>(d, descriptor(shared_address(s_bytes), 0),
                                                    descriptor(shared_address(s_bytes + 8192), 0),
                                                    false);
  commit_products();
}

// A value that another warp has written, behind a barrier.
template <bool kWrong>
__device__ void read_of_another_warp(uint32_t* out) {
  floats()[threadIdx.x] = threadIdx.x;
  if (!kWrong) __syncthreads();
  out[threadIdx.x] = floats()[(threadIdx.x + 32) % blockDim.x];
}

// Shared memory given back before it is written again.
template <bool kWrong>
__device__ void write_over_what_is_read(uint32_t* out) {
  if (first()) floats()[0] = 5;
  __syncthreads();
  out[threadIdx.x] = floats()[0];
  if (!kWrong) __syncthreads();
  if (threadIdx.x == blockDim.x - 1) floats()[0] = 6;
}

template <bool kWrong>
__device__ void stay_in_shared_memory(uint32_t* out) {
  floats()[threadIdx.x + (kWrong ? 16384 / 4 - blockDim.x + 1 : 0)] = 1;
  out[threadIdx.x] = 1;
}

template <bool kWrong>
__device__ void stay_in_global_memory(uint32_t* out) {
  out[threadIdx.x + (kWrong ? 1 : 0)] = 1;
}

// Ordinary writes, a fence, and a product.
template <bool kWrong>
__device__ void fence_before_a_product(uint32_t* out) {
  write_tiles(!kWrong);
  float d[32];
  begin_product(d);
  wait_for_products<0>();
  out[threadIdx.x] = static_cast<uint32_t>(d[3]);
}

// A product waited for before what it reads is written again.
template <bool kWrong>
__device__ void wait_for_a_product(uint32_t* out) {
  write_tiles(true);
  float d[32];
  begin_product(d);
  if (!kWrong) wait_for_products<0>();
  __syncthreads();
  if (first()) floats()[0] = 0;
  wait_for_products<0>();
  out[threadIdx.x] = static_cast<uint32_t>(d[3]);
}

// A bulk copy waited for before it is read.
template <bool kWrong>
__device__ void wait_for_a_bulk_copy(uint32_t* out) {
  __shared__ uint64_t full;
  if (first()) {
    out[0] = 7;
    init_barrier(&full, 1);
  }
  __syncthreads();
  if (first()) bulk_copy(s_bytes, out, 16, &full);
  if (!kWrong || !first()) wait(&full, 0);
  out[threadIdx.x] = reinterpret_cast<uint32_t*>(s_bytes)[0];
}

// Copies of lanes, which arrive at a barrier when they are there.
template <bool kWrong>
__device__ void wait_for_lane_copies(uint32_t* out) {
  __shared__ uint64_t full;
  if (first()) init_barrier(&full, blockDim.x);
  out[threadIdx.x] = 9;
  __syncthreads();
  copy16(shared_address(s_bytes) + 16 * threadIdx.x, out, true);
  arrive_after_copies(&full);
  if (!kWrong) wait(&full, 0);
  out[threadIdx.x] = reinterpret_cast<uint32_t*>(s_bytes)[4 * ((threadIdx.x + 32) % blockDim.x)];
}

// A bulk store that has read shared memory before the block ends.
template <bool kWrong>
__device__ void wait_for_a_bulk_store(uint32_t* out) {
  reinterpret_cast<uint32_t*>(s_bytes)[threadIdx.x] = 3;
  fence_for_products();
  __syncthreads();
  if (!first()) return;
  bulk_store(out, s_bytes, 4 * static_cast<int>(blockDim.x));
  commit_bulk_stores();
  if (!kWrong) wait_for_bulk_stores();
}

// A barrier that all who are expected arrive at.
template <bool kWrong>
__device__ void arrive_at_a_barrier(uint32_t* out) {
  __shared__ uint64_t barrier;
  if (first()) init_barrier(&barrier, blockDim.x);
  __syncthreads();
  if (!kWrong || !first()) arrive(&barrier);
  wait(&barrier, 0);
  out[threadIdx.x] = 1;
}

// One that was made before.
template <bool kWrong>
__device__ void make_a_barrier(uint32_t* out) {
  __shared__ uint64_t barrier;
  if (!kWrong && first()) init_barrier(&barrier, blockDim.x);
  __syncthreads();
  arrive(&barrier);
  out[threadIdx.x] = 1;
}

// What a block of a cluster sends to the other one, whose barrier counts the bytes.
template <bool kWrong>
__device__ void wait_for_another_block(uint32_t* out) {
  __shared__ uint64_t received;
  const int rank = blockIdx.x % 2;
  auto* words = reinterpret_cast<uint32_t*>(s_bytes);
  words[threadIdx.x] = rank + 1;
  if (first()) {
    init_barrier(&received, 1);
    arrive_and_expect(shared_address(&received), 16);
    fence_barriers();
  }
  fence_for_products();
  sync_cluster();
  if (first())
    bulk_send(address_in(s_bytes + 4096, 1 - rank), s_bytes, 16, address_in(&received, 1 - rank));
  if (!kWrong) wait(&received, 0);
  out[blockIdx.x * blockDim.x + threadIdx.x] = words[1024];
  sync_cluster();  // nobody ends while the other sends
}

}  // namespace

#define GLA_BOTH(name)                                                         \
  extern "C" __global__ void name##_right(uint32_t* out) { name<false>(out); } \
  extern "C" __global__ void name##_wrong(uint32_t* out) { name<true>(out); }
GLA_BOTH(read_of_another_warp)
GLA_BOTH(write_over_what_is_read)
GLA_BOTH(stay_in_shared_memory)
GLA_BOTH(stay_in_global_memory)
GLA_BOTH(fence_before_a_product)
GLA_BOTH(wait_for_a_product)
GLA_BOTH(wait_for_a_bulk_copy)
GLA_BOTH(wait_for_lane_copies)
GLA_BOTH(wait_for_a_bulk_store)
GLA_BOTH(arrive_at_a_barrier)
GLA_BOTH(make_a_barrier)
GLA_BOTH(wait_for_another_block)

// Kernels that follow each other in a stream; all but the first may start before the last one ends.
extern "C" __global__ void write(uint32_t* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void read_behind_wait(uint32_t* out) {
  await_previous_kernel();
  out[512 + threadIdx.x] = out[threadIdx.x];
}
extern "C" __global__ void read_behind_wait_of_a_warp(uint32_t* out) {
  if (threadIdx.x < 32) await_previous_kernel();
  __syncthreads();
  out[512 + threadIdx.x] = out[threadIdx.x];
}
extern "C" __global__ void read_before_wait(uint32_t* out) {
  const uint32_t x = out[threadIdx.x];
  await_previous_kernel();
  out[512 + threadIdx.x] = x;
}
extern "C" __global__ void write_before_wait(uint32_t* out) {
  out[512 + threadIdx.x] = 1;
  await_previous_kernel();
}
extern "C" __global__ void never_wait(uint32_t*) { release_next_kernel(); }
extern "C" __global__ void release_before_wait(uint32_t*) {
  release_next_kernel();
  await_previous_kernel();
}
extern "C" __global__ void release_behind_wait(uint32_t*) {
  await_previous_kernel();
  release_next_kernel();
}
