// The first half of NormMlp for up to eight tokens: norm, gate and up, SwiGLU. The second half is a Linear.
#include "kernels/launch.h"
#include "kernels/mlp_internal.h"
#include "kernels/norm_rows.h"
#include "kernels/swiglu.cuh"

namespace flint {

namespace {

/// One token's.
template <int H, int THREADS>
struct MlpSingleShared {
    alignas(16) uint32_t x[SharedX<1>::bytes(H) / 4];
    NormScratch<H, THREADS> norm;
};

/// Grid (2 I / 16): a panel holds gate and up of 8 units. kSPLIT warps a block. One token is normalised here; of
/// several `x` [T, H] are the normalised rows, ordered.
template <WeightFormat F, int H, bool SINGLE>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP)
    mlpUpKernel(MlpParams const params, bf16 const* x, bf16* act) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    constexpr int THREADS = PARTS * kWARP;
    using Rows = StagedX<Split<F, H>::kTILES, kDECODE_TOKENS>;
    extern __shared__ __align__(16) uint4 staged[]; // several tokens: each warp's activations
    __shared__ __align__(16) float sums[PartialSums::floats(PARTS)];
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;

    SliceOf<F, H> slice;
    slice.template load<H>(params.gate_up + blockIdx.x * panelBytes(F, H), part, lane);
    float const gateScale = kRESTORE<F> * (params.gate_up_scale == nullptr ? 1.0f : params.gate_up_scale[0]);
    float const upScale = kRESTORE<F> * (params.gate_up_scale == nullptr ? 1.0f : params.gate_up_scale[1]);
    allowSuccessor();
    float acc[1][4];
    if constexpr (SINGLE) {
        __shared__ MlpSingleShared<H, THREADS> shared;
        shared.norm.prefetch(params.norm);
        waitForPredecessor();
        NormParams const norm{params.delta,        params.residual, params.norm,
                              params.residual_out, params.eps,      params.tokens};
        normalizeToken<H, THREADS>(norm, shared.norm, blockIdx.x == 0, shared.x);
        slice.multiply(acc, part, SharedX<1>{reinterpret_cast<uint4 const*>(shared.x), lane});
    } else {
        waitForPredecessor();
        Rows const rows{staged + part * Rows::kVECTORS, part, lane};
        rows.template stage<true>(params.tokens, [&](int token) { return x + int64_t{token} * H; });
        slice.multiply(acc, part, rows);
    }
    PartialSums const partial{sums};
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

template <WeightFormat F, int H>
cudaError_t launchInstance(MlpParams const& params, bf16* x, bf16* act, cudaStream_t stream) {
    dim3 const grid(2 * params.intermediate / kPANEL_ROWS), block(Split<F, H>::kSPLIT * kWARP);
    bf16 const* const rows = x;
    if (params.tokens == 1) {
        return launchOverlapped(mlpUpKernel<F, H, true>, grid, block, 0, stream, params, rows, act);
    }
    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    if (cudaError_t const error = launchNormRows(norm, H, RowOrder::kDECODE, x, stream); error != cudaSuccess) {
        return error;
    }
    auto const kernel = mlpUpKernel<F, H, false>;
    constexpr size_t BYTES =
        Split<F, H>::kSPLIT * StagedX<Split<F, H>::kTILES, kDECODE_TOKENS>::kVECTORS * sizeof(uint4);
    static_assert(BYTES + PartialSums::floats(Split<F, H>::kSPLIT) * sizeof(float) <= kCOMMON_SHARED_BYTES);
    if (cudaError_t const error = allowShared(kernel, BYTES); error != cudaSuccess) {
        return error;
    }
    return launchOverlapped(kernel, grid, block, BYTES, stream, params, rows, act);
}

} // namespace

cudaError_t launchMlpUpDecode(MlpParams const& params, bf16* x, bf16* act, cudaStream_t stream) {
    bool const packed = params.format == WeightFormat::kNVFP4;
    switch (params.hidden) {
    case 2048:
        return packed ? launchInstance<WeightFormat::kNVFP4, 2048>(params, x, act, stream)
                      : launchInstance<WeightFormat::kBF16, 2048>(params, x, act, stream);
    case 128:
        return packed ? launchInstance<WeightFormat::kNVFP4, 128>(params, x, act, stream)
                      : launchInstance<WeightFormat::kBF16, 128>(params, x, act, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
