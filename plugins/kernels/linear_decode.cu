// Linear for up to eight tokens: one block per panel of 16 rows, its warps divide K.
#include "kernels/launch.h"
#include "kernels/linear.h"
#include "kernels/slice.cuh"

namespace flint {

namespace {

/// Grid (N / 16); kSPLIT warps a block.
template <WeightFormat F, int K, typename X>
__global__ void __launch_bounds__(Split<F, K>::kSPLIT* kWARP) linearDecodeKernel(LinearParams const params) {
    constexpr int PARTS = Split<F, K>::kSPLIT;
    __shared__ __align__(16) float sums[PartialSums::floats(PARTS)];
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;

    SliceOf<F, K> slice;
    slice.template load<K>(params.weight + blockIdx.x * panelBytes(F, K), part, lane);
    float const scale = kRESTORE<F> * (params.scale == nullptr ? 1.0f : *params.scale);
    waitForPredecessor();
    allowSuccessor();

    int const token = lane / 4;
    float acc[1][4] = {};
    slice.multiply(acc, part, X{token < params.tokens ? params.x + int64_t{token} * K : nullptr, lane});
    PartialSums const partial{sums};
    partial.store(acc[0], part, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < kPANEL_ROWS * params.tokens; i += PARTS * kWARP) {
        int const row = i % kPANEL_ROWS, t = i / kPANEL_ROWS;
        params.y[int64_t{t} * params.rows + blockIdx.x * kPANEL_ROWS + row] =
            __float2bfloat16_rn(partial.sum(PARTS, row, t) * scale);
    }
}

template <WeightFormat F, int K>
cudaError_t launchInstance(LinearParams const& params, cudaStream_t stream) {
    auto const kernel = params.ordered ? linearDecodeKernel<F, K, OrderedX> : linearDecodeKernel<F, K, PlainX>;
    return launchOverlapped(kernel, dim3(params.rows / kPANEL_ROWS), dim3(Split<F, K>::kSPLIT * kWARP), 0, stream,
                            params);
}

template <WeightFormat F>
cudaError_t launchFormat(LinearParams const& params, cudaStream_t stream) {
    switch (params.columns) {
    case 4096: // output projection: 32 heads
        return launchInstance<F, 4096>(params, stream);
    case 6144: // dense MLP
        return launchInstance<F, 6144>(params, stream);
    case 2048: // flint-nano's output projection: 16 heads
        return launchInstance<F, 2048>(params, stream);
    case 256: // flint-nano's dense MLP
        return launchInstance<F, 256>(params, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

bool hasLinearDecode(int columns) {
    return columns == 4096 || columns == 6144 || columns == 2048 || columns == 256;
}

cudaError_t launchLinearDecode(LinearParams const& params, cudaStream_t stream) {
    return params.format == WeightFormat::kNVFP4 ? launchFormat<WeightFormat::kNVFP4>(params, stream)
                                                 : launchFormat<WeightFormat::kBF16>(params, stream);
}

} // namespace flint
