// The chunks of a packed batch, from cu_seqlens alone and on the device, so that a captured graph
// replays with other offsets.
//
// reads   cu_seqlens [N + 1]
// writes  sequences [N + 1], the last of them the tokens behind every sequence; chunk_slots [slots]
//
// Offsets are clamped to [0, T], so that wrong ones never lead outside a tensor.
#include <cub/block/block_scan.cuh>

#include "device/launch.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kMapThreads = 512;

__device__ int64_t offset(const ChunkGrid& grid, int64_t n) {
  const int64_t x = grid.offsets_are_int64 ? static_cast<const int64_t*>(grid.cu_seqlens)[n]
                                           : static_cast<const int32_t*>(grid.cu_seqlens)[n];
  return x < 0 ? 0 : x > grid.T ? grid.T : x;
}

// One block: a running scan over the chunks of kMapThreads sequences at a time.
__global__ void map_sequences(Problem p) {
  using Scan = cub::BlockScan<int64_t, kMapThreads>;
  __shared__ typename Scan::TempStorage storage;
  const ChunkGrid& grid = p.grid;
  int64_t done = 0, segments_done = 0, states_done = 0;
  for (int64_t first = 0; first <= grid.N; first += kMapThreads) {
    const int64_t n = first + threadIdx.x;
    Sequence sequence{0, 0, 0, 0, 0};
    if (n <= grid.N) {
      sequence.start = offset(grid, n);
      const int64_t end = n < grid.N ? offset(grid, n + 1) : grid.T;
      sequence.length = end > sequence.start ? end - sequence.start : 0;
    }
    const int64_t chunks = (sequence.length + kChunk - 1) / kChunk;
    int64_t before, total;
    Scan(storage).ExclusiveSum(chunks, before, total);
    sequence.first_slot = done + before;
    if (n <= grid.N) {
      // Offsets that go back could ask for more chunks than S and the slots have.
      const int64_t left = (n < grid.N ? grid.chunks : grid.slots) - sequence.first_slot;
      if (chunks > left) sequence.length = left > 0 ? left * kChunk : 0;
      grid.sequences[n] = sequence;
    }
    done += total;
    __syncthreads();  // before the storage is used again
    if (grid.segment_chunks > 0) {
      const int64_t kept = blocks_of(sequence.length, kChunk);
      const int64_t segments = max(blocks_of(kept, grid.segment_chunks), int64_t{1});
      Scan(storage).ExclusiveSum(segments, before, total);
      if (n <= grid.N) grid.sequences[n].first_segment = segments_done + before;
      segments_done += total;
      __syncthreads();  // before the storage is used again
      Scan(storage).ExclusiveSum(segments > 1 ? segments : 0, before, total);
      if (n <= grid.N) grid.sequences[n].first_state = states_done + before;
      states_done += total;
      __syncthreads();  // before the storage is used again
    }
  }
}

__global__ void map_chunks(Problem p) {
  const ChunkGrid& grid = p.grid;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kMapThreads + threadIdx.x;
  if (slot >= grid.slots) return;
  int64_t low = 0, high = grid.N;  // the last sequence whose first slot is not behind this one
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (grid.sequences[middle].first_slot <= slot)
      low = middle;
    else
      high = middle - 1;
  }
  const Sequence sequence = grid.sequences[low];
  const int64_t done = (slot - sequence.first_slot) * kChunk;
  const int64_t left = sequence.length - done;
  grid.chunk_slots[slot] = {sequence.start + done,
                            static_cast<int32_t>(left <= 0       ? 0
                                                 : left < kChunk ? left
                                                                 : kChunk),
                            static_cast<int32_t>(low)};
}

}  // namespace

void chunk_map(const Problem& p, cudaStream_t stream) {
  launch(map_sequences, 1, kMapThreads, p, stream);
  launch(map_chunks, blocks_of(p.grid.slots, kMapThreads), kMapThreads, p, stream);
}

}  // namespace gla_ext::cuda
