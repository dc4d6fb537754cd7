// Device primitives that several kernels share: dependent launch, matrix instructions, asynchronous copies, rounding.
#pragma once

#include "kernels/types.h"

namespace flint {

using bf16x2 = __nv_bfloat162;

constexpr int kWARP = 32;

/// Wait until the kernels before this one in the stream have ended and their writes are visible. A no-op in a kernel
/// launched without launchOverlapped.
__device__ __forceinline__ void waitForPredecessor() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Allow the next kernel of the stream to start its prefetches. It still waits for this kernel's end.
__device__ __forceinline__ void allowSuccessor() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ uint32_t packBf16(float low, float high) {
    bf16x2 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
}

/// r(x) of the numerics rules, as a float: the upper half of a pair, as a conversion to a single BF16 value is slow.
__device__ __forceinline__ float roundBf16(float x) {
    return __uint_as_float(packBf16(0.0f, x));
}

/// The two values of a packed pair as floats; exact.
__device__ __forceinline__ float2 unpackBf16(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

/// d += a b: a is 16x16 (rows g, g + 8 of lane / 4), b 16x8 (column lane / 4), both BF16; d 16x8 in FP32.
__device__ __forceinline__ void mma16816(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t sharedAddress(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Four 8x8 BF16 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix4(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix4Transposed(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

/// The transpose of an 8x8 BF16 matrix whose lane l holds values 2 (l % 4), 2 (l % 4) + 1 of row l / 4.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t pair) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

/// L2 policy of what a step reads once: weights and old KV are many times the L2, and would push out what stays in use,
/// activations and the kernels' own code.
__device__ __forceinline__ uint64_t readOncePolicy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/// 16 bytes from global to shared memory, asynchronously and past L1; zeros where !valid (nothing is read then).
__device__ __forceinline__ void copyAsync16(uint32_t shared, void const* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

/// The same of bytes that the step reads once.
///
/// The mask changes no shared address (block's number in its cluster in bits 27 - 24), but hides what the address is
/// made of: ptxas before 13.4 would take a part that is uniform in a warp into the copy's uniform register, which
/// holds the policy, too, and then encodes register 0 for both. Such a copy is an illegal instruction, or goes
/// anywhere.
__device__ __forceinline__ void copyOnceAsync16(uint32_t shared, void const* global, bool valid) {
    asm volatile("{\n"
                 ".reg .b32 target;\n"
                 "and.b32 target, %0, 0x0FFFFFFF;\n"
                 "cp.async.cg.shared.global.L2::cache_hint [target], [%1], 16, %2, %3;\n"
                 "}" ::"r"(shared),
                 "l"(global), "r"(valid ? 16 : 0), "l"(readOncePolicy())
                 : "memory");
}

__device__ __forceinline__ void commitCopies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Wait until at most `Pending` of this thread's latest groups are still under way.
template <int Pending>
__device__ __forceinline__ void waitCopies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// Wait until an mbarrier in shared memory completes; `parity` of the times that it has before.
__device__ __forceinline__ void waitMbarrier(uint64_t const* barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(sharedAddress(barrier)),
                 "r"(parity)
                 : "memory");
}

/// A barrier in shared memory that completes when all bytes announced to it have arrived, or a number of arrivals.
class CopyBarrier {
  public:
    /// By one thread; everyone else sees the barrier after a __syncthreads, other blocks after waitCluster.
    __device__ __forceinline__ void open(int arrivals = 1) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;\n"
                     "fence.proxy.async.shared::cta;" ::"r"(sharedAddress(&mState)),
                     "r"(arrivals)
                     : "memory");
    }

    /// Arrive without bytes.
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(sharedAddress(&mState)) : "memory");
    }

    /// By one thread: how many bytes will be copied. Again when that has completed.
    __device__ __forceinline__ void expect(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(sharedAddress(&mState)), "r"(bytes)
                     : "memory");
    }

    /// Start copying `bytes` from global to shared memory by the copy engine; all a multiple of 16.
    __device__ __forceinline__ void copy(void* shared, void const* global, int bytes) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         sharedAddress(shared)),
                     "l"(global), "r"(bytes), "r"(sharedAddress(&mState))
                     : "memory");
    }

    /// The same of bytes that the step reads once.
    __device__ __forceinline__ void copyOnce(void* shared, void const* global, int bytes) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                     "[%3], %4;" ::"r"(sharedAddress(shared)),
                     "l"(global), "r"(bytes), "r"(sharedAddress(&mState)), "l"(readOncePolicy())
                     : "memory");
    }

    /// Wait for all copies; `parity` is 0 the first time, 1 the second, and so on.
    __device__ __forceinline__ void wait(uint32_t parity = 0) const { waitMbarrier(&mState, parity); }

  private:
    uint64_t mState;
};

/// Order what this thread has read or written in shared memory before what the copy engine writes there; other threads'
/// with a barrier between.
__device__ __forceinline__ void fenceCopies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Barrier `id` among `threads` threads of the block; barrier 0 is __syncthreads.
__device__ __forceinline__ void syncNamed(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// 16 bytes that are read once: not kept in L1, first to leave the L2. Not a load through the read-only path
/// (ld.global.nc): the assembler moves those across barriers and griddepcontrol.wait, down to their uses, and the
/// prefetch is lost.
__device__ __forceinline__ uint4 loadStreaming(void const* pointer) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer), "l"(readOncePolicy())
                 : "memory");
    return value;
}

/// The same of 8 bytes, which L1 may keep.
__device__ __forceinline__ void loadStreaming8(void const* pointer, uint32_t& low, uint32_t& high) {
    asm volatile("ld.global.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
                 : "=r"(low), "=r"(high)
                 : "l"(pointer), "l"(readOncePolicy())
                 : "memory");
}

/// 16 bytes of an activation, at this place in the program: several of them are under way together, where the compiler
/// would else put each just before its use.
__device__ __forceinline__ uint4 loadNow16(void const* pointer) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer)
                 : "memory");
    return value;
}

/// The same past L1: for what is read once, or may be there from an earlier kernel's time.
__device__ __forceinline__ uint4 loadPastL1(void const* pointer) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer)
                 : "memory");
    return value;
}

/// Fewer bytes, at this place in the program, too.
__device__ __forceinline__ float2 loadNow8(void const* pointer) {
    float2 value;
    asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(pointer) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t loadNow4(void const* pointer) {
    uint32_t value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t loadNow2(void const* pointer) {
    uint16_t value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(pointer) : "memory");
    return value;
}

template <int Width = kWARP>
__device__ __forceinline__ float warpSum(float x) {
#pragma unroll
    for (int mask = Width / 2; mask > 0; mask /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
    }
    return x;
}

} // namespace flint
