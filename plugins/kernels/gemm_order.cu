#include "kernels/device.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_order.cuh"
#include "kernels/launch.h"

namespace flint {

namespace {

constexpr int kTHREADS = 256;
constexpr int kVECTOR = 8; // BF16 values in 16 bytes

/// One thread per 8 columns. It writes four pairs; the 8 threads of a 64-column tile fill a sector with each. (No
/// __restrict__: it would allow the compiler to read x before the wait.)
__global__ void __launch_bounds__(kTHREADS) gemmOrderKernel(uint4 const* x, uint32_t* ordered, int64_t vectors) {
    waitForPredecessor();
    allowSuccessor();
    int64_t const i = static_cast<int64_t>(blockIdx.x) * kTHREADS + threadIdx.x;
    if (i >= vectors) {
        return;
    }
    uint4 const v = x[i];
    uint32_t* const tile = ordered + i / 8 * 32;
    int const column = static_cast<int>(i % 8) * kVECTOR;
    tile[gemmOrder(column) / 2] = __byte_perm(v.x, v.y, 0x5410);
    tile[gemmOrder(column + 1) / 2] = __byte_perm(v.x, v.y, 0x7632);
    tile[gemmOrder(column + 4) / 2] = __byte_perm(v.z, v.w, 0x5410);
    tile[gemmOrder(column + 5) / 2] = __byte_perm(v.z, v.w, 0x7632);
}

} // namespace

cudaError_t launchGemmOrder(GemmOrderParams const& params, cudaStream_t stream) {
    int64_t const vectors = params.tokens * params.columns / kVECTOR;
    if (params.columns % kTILE_COLUMNS != 0 || vectors > int64_t{1} << 36) {
        return cudaErrorInvalidValue;
    }
    if (vectors == 0) {
        return cudaSuccess;
    }
    return launchOverlapped(gemmOrderKernel, dim3(static_cast<unsigned>((vectors + kTHREADS - 1) / kTHREADS)),
                            dim3(kTHREADS), 0, stream, static_cast<uint4 const*>(params.x),
                            static_cast<uint32_t*>(params.ordered), vectors);
}

} // namespace flint
