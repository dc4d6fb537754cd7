#include "kernels/norm_rows.h"

#include "kernels/gemm_order.cuh"
#include "kernels/launch.h"

namespace flint {

namespace {

template <int H>
constexpr int kTHREADS = H / kNORM_COLUMNS < kWARP ? kWARP : H / kNORM_COLUMNS;

/// Grid (T); a thread owns 8 columns of the block's row. Sums in the order of normalizeRows.
template <int H>
__global__ void __launch_bounds__(kTHREADS<H>) normRowsKernel(NormParams const params, bf16* x) {
    constexpr int SEGMENTS = H / kNORM_COLUMNS, WARPS = kTHREADS<H> / kWARP;
    __shared__ float sums[WARPS];
    waitForPredecessor();
    allowSuccessor();
    int const column = threadIdx.x * kNORM_COLUMNS;
    int64_t const row = int64_t{blockIdx.x} * H;
    bool const live = threadIdx.x < SEGMENTS;
    NormSegment segment;
    float squares = warpSum(live ? segment.load(params, row + column) : 0.0f);
    if constexpr (WARPS > 1) {
        if (threadIdx.x % kWARP == 0) {
            sums[threadIdx.x / kWARP] = squares;
        }
        __syncthreads();
        squares = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            squares += sums[i];
        }
    }
    if (live) {
        uint4 const pairs = segment.pairs(rsqrtf(squares / H + params.eps), params.weight + column);
        bf16* const tile = x + row + column / kTILE_COLUMNS * kTILE_COLUMNS;
        int const first = column % kTILE_COLUMNS;
        *reinterpret_cast<uint32_t*>(tile + gemmOrder(first)) = pairs.x;
        *reinterpret_cast<uint32_t*>(tile + gemmOrder(first + 1)) = pairs.y;
        *reinterpret_cast<uint32_t*>(tile + gemmOrder(first + 4)) = pairs.z;
        *reinterpret_cast<uint32_t*>(tile + gemmOrder(first + 5)) = pairs.w;
        if (params.residual_out != nullptr) {
            segment.storeResidual(params, row + column);
        }
    }
}

} // namespace

cudaError_t launchNormRows(NormParams const& params, int hidden, bf16* x, cudaStream_t stream) {
    switch (hidden) {
    case 2048:
        return launchOverlapped(normRowsKernel<2048>, dim3(params.tokens), dim3(kTHREADS<2048>), 0, stream, params, x);
    case 128:
        return launchOverlapped(normRowsKernel<128>, dim3(params.tokens), dim3(kTHREADS<128>), 0, stream, params, x);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
