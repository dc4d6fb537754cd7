// The arithmetic with wgmma (compute capability 9.0): A, the dequantised panels, from registers; B, the tokens, from
// shared memory. A warpgroup's m64k16 fragment is the m16k16 fragments of its four warps, and its accumulators are
// those of mma.sync.
#pragma once

#include "kernels/gemm_load.cuh"

namespace flint {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace detail {

/// d[n / 8][4] (+)= a b: b by descriptor, TOKENS rows of 16 values of K.
template <int TOKENS>
struct Wgmma;

#    define FLINT_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])

template <>
struct Wgmma<64> {
    __device__ __forceinline__ static void run(float (&d)[16][4], uint32_t const (&a)[4], uint64_t b, int accumulate) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                     : FLINT_D(0), FLINT_D(1), FLINT_D(2), FLINT_D(3), FLINT_D(4), FLINT_D(5), FLINT_D(6), FLINT_D(7)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <>
struct Wgmma<128> {
    __device__ __forceinline__ static void run(float (&d)[16][4], uint32_t const (&a)[4], uint64_t b, int accumulate) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
                     "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
                     "%56, %57, %58, %59, %60, %61, %62, %63"
                     "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
                     : FLINT_D(0), FLINT_D(1), FLINT_D(2), FLINT_D(3), FLINT_D(4), FLINT_D(5), FLINT_D(6), FLINT_D(7),
                       FLINT_D(8), FLINT_D(9), FLINT_D(10), FLINT_D(11), FLINT_D(12), FLINT_D(13), FLINT_D(14),
                       FLINT_D(15)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

#    undef FLINT_D

__device__ __forceinline__ void wgmmaFence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmmaCommit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int Pending>
__device__ __forceinline__ void wgmmaWait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// K-major rows of 128 bytes with the 128-byte swizzle; 8 rows to the next core matrix group.
__device__ __forceinline__ uint64_t wgmmaDescriptor(uint32_t address) {
    constexpr uint64_t SWIZZLE_128 = uint64_t{1} << 62;
    constexpr uint64_t GROUP_STRIDE = uint64_t{1024 / 16} << 32;
    return SWIZZLE_128 | GROUP_STRIDE | (uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}

/// Keep the compiler from computing on `value` above this point.
__device__ __forceinline__ void pin(uint32_t& value) {
    asm volatile("" : "+r"(value));
}

} // namespace detail

/// acc[panel][8 tokens][4] (+)= panels x the first TOKENS tokens over the K-tile in `stage`.
///
/// Issues two groups of two instructions' worth and leaves the second under way; a group's operand registers are
/// written anew only after a wait that has seen it end, one group later. So when this returns, the products of the
/// K-tile before are done, and with GemmConfig's LAG its stage may be refilled after the next barrier.
/// (No branch may stand between the groups: ptxas then gives up on keeping them apart and waits after each.)
template <typename C, int TOKENS>
__device__ __forceinline__ void multiplyTileWgmma(float (&acc)[C::PANELS][C::TOKENS / 8][4],
                                                  GemmWeights<C> const& weights, uint32_t activations, int stage,
                                                  bool accumulate) {
    // NVFP4 is loaded ahead, since its operands are computed into registers of their own. BF16 operands are what is
    // loaded: only after the wait, or the load would write registers that a group under way still reads.
    constexpr bool LOAD_AHEAD = C::FORMAT == WeightFormat::kNVFP4;
    GemmPanel<C::FORMAT> data[C::PANELS];
    if constexpr (LOAD_AHEAD) {
#    pragma unroll
        for (int p = 0; p < C::PANELS; ++p) {
            data[p] = weights.load(stage, p);
        }
    }
    uint64_t const descriptor = detail::wgmmaDescriptor(activations + stage * C::X_BYTES);
#    pragma unroll
    for (int half = 0; half < 2; ++half) {
        detail::wgmmaWait<1>();
        uint32_t a[C::PANELS][4][4];
#    pragma unroll
        for (int p = 0; p < C::PANELS; ++p) {
            if constexpr (LOAD_AHEAD) {
                detail::pin(half == 0 ? data[p].codes.x : data[p].codes.y);
                detail::pin(half == 0 ? data[p].codes.z : data[p].codes.w);
            } else {
                weights.loadHalf(data[p], stage, p, half);
            }
            data[p].operands(a[p]); // of which this half uses two instructions
        }
        detail::wgmmaFence();
#    pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
#    pragma unroll
            for (int p = 0; p < C::PANELS; ++p) {
                detail::Wgmma<TOKENS>::run(acc[p], a[p][i], descriptor + i * 2, accumulate || i > 0);
            }
        }
        detail::wgmmaCommit();
    }
}

#endif

} // namespace flint
