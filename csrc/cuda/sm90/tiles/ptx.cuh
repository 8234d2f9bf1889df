// Wrappers of sm_90a instructions, one each: warpgroup products, barriers in shared memory, fences.
#pragma once

#include "cuda/device/mma.cuh"

namespace gla_ext::cuda::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers in shared memory that count arrivals (mbarrier).
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      "  .reg .pred done;\n"
      "again:\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "  @!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Tests whether the phase is complete, without waiting.
__device__ __forceinline__ bool has_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      "  .reg .pred done;\n"
      "  mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// A named barrier of `threads` threads; number 0 is __syncthreads.
template <int kNumber>
__device__ __forceinline__ void sync_threads(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "r"(threads) : "memory");
}

// Makes ordinary writes to shared memory visible to warpgroup products.
__device__ __forceinline__ void fence_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Arrives at `barrier` once all copies that this thread has issued so far are complete. Warpgroup
// products see the copied data after a fence by the thread that waits.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Copies 16 bytes from global to shared memory asynchronously; writes zeros if not `there`.
__device__ __forceinline__ void copy16(uint32_t shared, const void* p, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(p),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until all but the newest kPending groups of this thread's copies are complete.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives at `barrier` and lets its phase also wait for `bytes` of the following copies.
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Copies `bytes`, a multiple of 16, from global to shared memory. Called by one thread; `barrier`
// must already expect the bytes.
__device__ __forceinline__ void bulk_copy_expected(const void* shared, const void* global,
                                                   int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Arrives at `barrier`, which then expects the bytes, and copies them.
__device__ __forceinline__ void bulk_copy(const void* shared, const void* global, int bytes,
                                          uint64_t* barrier) {
  arrive_and_expect(barrier, bytes);
  bulk_copy_expected(shared, global, bytes, barrier);
}
// Copies from shared to global memory. Wait for it before the block ends and before the shared
// memory is written again.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;");
}
// Waits until all but the newest kPending groups of this thread's bulk stores have read shared
// memory.
template <int kPending = 0>
__device__ __forceinline__ void wait_for_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Stores four 8 x 8 matrices transposed: each lane's pairs become columns. Lane l passes the
// address of a row of matrix l / 8.
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t r0, uint32_t r1,
                                                 uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, "
      "%3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// Stores four 8 x 8 matrices without transposing.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t r0, uint32_t r1,
                                               uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Warpgroup products: issue them between begin_products and commit_products, then wait.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The descriptor of a bf16 operand in shared memory. A tile has rows of 64 elements in 128 bytes,
// whose 16-byte parts are swizzled (part ^ row % 8); eight rows take 1,024 bytes, and tiles of 64
// columns follow one another. `tile_bytes`: the distance between two tiles, for an operand whose
// contiguous dimension is not the summed one and has more than 64 elements.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t tile_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = 1024 >> 4;
  return kSwizzle128 | kEightRows << 32 | static_cast<uint64_t>(tile_bytes >> 4) << 16 |
         ((address & 0x3ffff) >> 4);
}

// Which dimension of an operand in shared memory is contiguous: the summed one, or the other.
enum class Contiguous { kSummed, kOther };

#define GLA_4_OPERANDS(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GLA_16_OPERANDS(d, i)                                               \
  GLA_4_OPERANDS(d, i), GLA_4_OPERANDS(d, i + 4), GLA_4_OPERANDS(d, i + 8), \
      GLA_4_OPERANDS(d, i + 12)
#define GLA_8_REGISTERS "%0, %1, %2, %3, %4, %5, %6, %7"
#define GLA_16_REGISTERS GLA_8_REGISTERS ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GLA_32_REGISTERS \
  GLA_16_REGISTERS       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GLA_64_REGISTERS                                                                    \
  GLA_32_REGISTERS                                                                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d [64 x N] = A B over 16 summed elements, or d += A B if `add`.
template <Contiguous kA, Contiguous kB>
__device__ __forceinline__ void product(float (&d)[8], uint64_t a, uint64_t b, bool add = true) {
  asm volatile(
      "{\n"
      "  .reg .pred add;\n"
      "  setp.ne.b32 add, %10, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" GLA_8_REGISTERS
      "}, %8, %9, add, 1, 1, %11, %12;\n"
      "}"
      : GLA_4_OPERANDS(d, 0), GLA_4_OPERANDS(d, 4)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA == Contiguous::kOther),
        "n"(kB == Contiguous::kOther));
}
template <Contiguous kA, Contiguous kB>
__device__ __forceinline__ void product(float (&d)[16], uint64_t a, uint64_t b, bool add = true) {
  asm volatile(
      "{\n"
      "  .reg .pred add;\n"
      "  setp.ne.b32 add, %18, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" GLA_16_REGISTERS
      "}, %16, %17, add, 1, 1, %19, %20;\n"
      "}"
      : GLA_16_OPERANDS(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA == Contiguous::kOther),
        "n"(kB == Contiguous::kOther));
}
template <Contiguous kA, Contiguous kB>
__device__ __forceinline__ void product(float (&d)[32], uint64_t a, uint64_t b, bool add = true) {
  asm volatile(
      "{\n"
      "  .reg .pred add;\n"
      "  setp.ne.b32 add, %34, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" GLA_32_REGISTERS
      "}, %32, %33, add, 1, 1, %35, %36;\n"
      "}"
      : GLA_16_OPERANDS(d, 0), GLA_16_OPERANDS(d, 16)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA == Contiguous::kOther),
        "n"(kB == Contiguous::kOther));
}
template <Contiguous kA, Contiguous kB>
__device__ __forceinline__ void product(float (&d)[64], uint64_t a, uint64_t b, bool add = true) {
  asm volatile(
      "{\n"
      "  .reg .pred add;\n"
      "  setp.ne.b32 add, %66, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" GLA_64_REGISTERS
      "}, %64, %65, add, 1, 1, %67, %68;\n"
      "}"
      : GLA_16_OPERANDS(d, 0), GLA_16_OPERANDS(d, 16), GLA_16_OPERANDS(d, 32),
        GLA_16_OPERANDS(d, 48)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA == Contiguous::kOther),
        "n"(kB == Contiguous::kOther));
}

// d and others: two results of 64 columns each, those of `others` after those of `d` in B.
template <Contiguous kA, Contiguous kB>
__device__ __forceinline__ void product(float (&d)[32], float (&others)[32], uint64_t a, uint64_t b,
                                        bool add = true) {
  asm volatile(
      "{\n"
      "  .reg .pred add;\n"
      "  setp.ne.b32 add, %66, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" GLA_64_REGISTERS
      "}, %64, %65, add, 1, 1, %67, %68;\n"
      "}"
      : GLA_16_OPERANDS(d, 0), GLA_16_OPERANDS(d, 16), GLA_16_OPERANDS(others, 0),
        GLA_16_OPERANDS(others, 16)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA == Contiguous::kOther),
        "n"(kB == Contiguous::kOther));
}

// Products with A in registers.
template <Contiguous kB = Contiguous::kSummed>
__device__ __forceinline__ void product(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                        bool add = true) {
  asm volatile(
      "{\n"
      "  .reg .pred add;\n"
      "  setp.ne.b32 add, %21, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" GLA_16_REGISTERS
      "}, {%16, %17, %18, %19}, %20, add, 1, 1, %22;\n"
      "}"
      : GLA_16_OPERANDS(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
        "n"(kB == Contiguous::kOther));
}
template <Contiguous kB = Contiguous::kSummed>
__device__ __forceinline__ void product(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                        bool add = true) {
  asm volatile(
      "{\n"
      "  .reg .pred add;\n"
      "  setp.ne.b32 add, %37, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" GLA_32_REGISTERS
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n"
      "}"
      : GLA_16_OPERANDS(d, 0), GLA_16_OPERANDS(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
        "n"(kB == Contiguous::kOther));
}

template <Contiguous kB = Contiguous::kSummed>
__device__ __forceinline__ void product(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                        bool add = true) {
  asm volatile(
      "{\n"
      "  .reg .pred add;\n"
      "  setp.ne.b32 add, %69, 0;\n"
      "  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" GLA_64_REGISTERS
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, %70;\n"
      "}"
      : GLA_16_OPERANDS(d, 0), GLA_16_OPERANDS(d, 16), GLA_16_OPERANDS(d, 32),
        GLA_16_OPERANDS(d, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
        "n"(kB == Contiguous::kOther));
}

#undef GLA_4_OPERANDS
#undef GLA_16_OPERANDS
#undef GLA_8_REGISTERS
#undef GLA_16_REGISTERS
#undef GLA_32_REGISTERS
#undef GLA_64_REGISTERS

}  // namespace gla_ext::cuda::sm90
