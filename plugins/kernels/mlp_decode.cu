// The first half of NormMlp for up to eight tokens: norm, gate and up, SwiGLU. The second half is a Linear.
#include "kernels/launch.h"
#include "kernels/mlp_internal.h"
#include "kernels/norm.cuh"
#include "kernels/swiglu.cuh"

namespace flint {

namespace {

template <WeightFormat F, int H, int TOKENS>
struct MlpShared {
    alignas(16) uint32_t x[SharedX<TOKENS>::bytes(H) / 4];
    float partial[PartialSums::floats(Split<F, H>::kSPLIT)];
    float sums[Split<F, H>::kSPLIT];
};

/// Grid (2 I / 16): a panel holds gate and up of 8 units. kSPLIT warps a block.
template <WeightFormat F, int H, int TOKENS>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP) mlpUpKernel(MlpParams const params, bf16* act) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    constexpr int THREADS = PARTS * kWARP;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<MlpShared<F, H, TOKENS>*>(raw);
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;

    SliceOf<F, H> slice;
    slice.template load<H>(params.gate_up + blockIdx.x * panelBytes(F, H), part, lane);
    float const gateScale = kRESTORE<F> * (params.gate_up_scale == nullptr ? 1.0f : params.gate_up_scale[0]);
    float const upScale = kRESTORE<F> * (params.gate_up_scale == nullptr ? 1.0f : params.gate_up_scale[1]);
    waitForPredecessor();
    allowSuccessor();

    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    normalizeRows<H, TOKENS, THREADS>(norm, blockIdx.x == 0, shared.x, shared.sums);
    float acc[1][4] = {};
    slice.multiply(acc, part, SharedX<TOKENS>{reinterpret_cast<uint4 const*>(shared.x), lane});
    PartialSums const partial{shared.partial};
    partial.store(acc[0], part, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * params.tokens; i += THREADS) {
        int const row = i % 8, token = i / 8, unit = blockIdx.x * 8 + row;
        float const gate = partial.sum(PARTS, row, token) * gateScale;
        float const up = partial.sum(PARTS, row + 8, token) * upScale;
        int const place = unit / 16 * 16 + activationOrder(unit % 16);
        act[int64_t{token} * params.intermediate + place] = swigluRounded(gate, up);
    }
}

template <WeightFormat F, int H, int TOKENS>
cudaError_t launchInstance(MlpParams const& params, bf16* act, cudaStream_t stream) {
    auto const kernel = mlpUpKernel<F, H, TOKENS>;
    constexpr size_t BYTES = sizeof(MlpShared<F, H, TOKENS>);
    if (cudaError_t const error = allowShared(kernel, BYTES); error != cudaSuccess) {
        return error;
    }
    return launchOverlapped(kernel, dim3(2 * params.intermediate / kPANEL_ROWS), dim3(Split<F, H>::kSPLIT * kWARP),
                            BYTES, stream, params, act);
}

template <WeightFormat F, int H>
cudaError_t launchFormat(MlpParams const& params, bf16* act, cudaStream_t stream) {
    return params.tokens == 1 ? launchInstance<F, H, 1>(params, act, stream)
                              : launchInstance<F, H, 8>(params, act, stream);
}

} // namespace

cudaError_t launchMlpUpDecode(MlpParams const& params, bf16* act, cudaStream_t stream) {
    bool const packed = params.format == WeightFormat::kNVFP4;
    switch (params.hidden) {
    case 2048:
        return packed ? launchFormat<WeightFormat::kNVFP4, 2048>(params, act, stream)
                      : launchFormat<WeightFormat::kBF16, 2048>(params, act, stream);
    case 128:
        return packed ? launchFormat<WeightFormat::kNVFP4, 128>(params, act, stream)
                      : launchFormat<WeightFormat::kBF16, 128>(params, act, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
