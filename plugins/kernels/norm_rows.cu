#include "kernels/norm_rows.h"

#include "kernels/gemm_order.cuh"
#include "kernels/launch.h"

namespace flint {

namespace {

template <int H>
constexpr int kTHREADS = H / kNORM_COLUMNS < kWARP ? kWARP : H / kNORM_COLUMNS;

/// Grid (T); a thread owns 8 columns of the block's row.
template <int H, RowOrder ORDER>
__global__ void __launch_bounds__(kTHREADS<H>) normRowsKernel(NormParams const params, bf16* x) {
    constexpr int SEGMENTS = H / kNORM_COLUMNS, WARPS = kTHREADS<H> / kWARP;
    __shared__ float sums[WARPS];
    bool const live = threadIdx.x < SEGMENTS;
    int const column = live ? threadIdx.x * kNORM_COLUMNS : 0;
    float4 const w0 = __ldg(reinterpret_cast<float4 const*>(params.weight + column));
    float4 const w1 = __ldg(reinterpret_cast<float4 const*>(params.weight + column) + 1);
    allowSuccessor();
    waitForPredecessor();
    int64_t const row = int64_t{blockIdx.x} * H;
    NormInputs inputs;
    NormSegment segment;
    float squares = 0;
    if (live) {
        inputs.load(params, row + column);
        squares = segment.add(inputs);
    }
    squares = warpSum(squares);
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
        uint4 const pairs = segment.pairs(rsqrtf(squares / H + params.eps), w0, w1);
        uint32_t const words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            constexpr int STARTS[4] = {0, 1, 4, 5};
            int const c = column + STARTS[i];
            int const place = ORDER == RowOrder::kDECODE
                                  ? c / 16 * 16 + activationOrder(c % 16)
                                  : c / kTILE_COLUMNS * kTILE_COLUMNS + gemmOrder(c % kTILE_COLUMNS);
            *reinterpret_cast<uint32_t*>(x + row + place) = words[i];
        }
        if (params.residual_out != nullptr) {
            segment.storeResidual(params, row + column);
        }
    }
}

template <int H>
cudaError_t launchInstance(NormParams const& params, RowOrder order, bf16* x, cudaStream_t stream) {
    auto const kernel =
        order == RowOrder::kDECODE ? normRowsKernel<H, RowOrder::kDECODE> : normRowsKernel<H, RowOrder::kPREFILL>;
    return launchOverlapped(kernel, dim3(params.tokens), dim3(kTHREADS<H>), 0, stream, params, x);
}

} // namespace

cudaError_t launchNormRows(NormParams const& params, int hidden, RowOrder order, bf16* x, cudaStream_t stream) {
    switch (hidden) {
    case 2048:
        return launchInstance<2048>(params, order, x, stream);
    case 128:
        return launchInstance<128>(params, order, x, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
