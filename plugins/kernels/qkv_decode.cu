// NormQkvRope's projection for one token: norm in every block, one block per panel of 16 rows.
#include "kernels/launch.h"
#include "kernels/norm.cuh"
#include "kernels/qkv_internal.h"

namespace flint {

namespace {

template <WeightFormat F, int H>
struct ProjectShared {
    alignas(16) uint32_t x[SharedX<1>::bytes(H) / 4];
    float partial[PartialSums::floats(Split<F, H>::kSPLIT)];
    NormScratch<H, Split<F, H>::kSPLIT * kWARP> norm;
};

/// Grid ((Hq + 2 Hkv) 128 / 16); kSPLIT warps a block. raw [N] bf16: the rounded projection.
template <WeightFormat F, int H>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP, kREADY_BLOCKS<F>)
    qkvProjectKernel(QkvParams const params, bf16* raw) {
    constexpr int PARTS = Split<F, H>::kSPLIT, THREADS = PARTS * kWARP;
    __shared__ ProjectShared<F, H> shared;
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;

    SliceOf<F, H> slice;
    slice.template load<H>(params.weight + blockIdx.x * panelBytes(F, H), part, lane);
    float scale = kRESTORE<F>;
    if (params.scale != nullptr) {
        int const head = blockIdx.x * kPANEL_ROWS / kHEAD_DIM;
        scale *= __ldg(params.scale + (head >= params.heads) + (head >= params.heads + params.kv_heads));
    }
    allowSuccessor();
    ReadySlice const ready(slice);
    ready.hold(params.tokens < 0, raw);
    shared.norm.prefetch(params.norm);
    waitForPredecessor();

    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    normalizeToken<H, THREADS>(norm, shared.norm, blockIdx.x == 0, shared.x);
    float acc[1][4];
    ready.multiply(acc, part, SharedX<1>{reinterpret_cast<uint4 const*>(shared.x), lane});
    PartialSums const partial{shared.partial};
    partial.store(acc[0], part, lane);
    __syncthreads();
    if (threadIdx.x < kPANEL_ROWS) {
        raw[blockIdx.x * kPANEL_ROWS + threadIdx.x] = __float2bfloat16_rn(partial.sum(PARTS, threadIdx.x, 0) * scale);
    }
}

template <WeightFormat F, int H>
cudaError_t launchInstance(QkvParams const& params, bf16* raw, cudaStream_t stream) {
    unsigned const panels = (params.heads + 2 * params.kv_heads) * (kHEAD_DIM / kPANEL_ROWS);
    return launchOverlapped(qkvProjectKernel<F, H>, dim3(panels), dim3(Split<F, H>::kSPLIT * kWARP), 0, stream, params,
                            raw);
}

} // namespace

cudaError_t launchQkvProject(QkvParams const& params, bf16* raw, cudaStream_t stream) {
    bool const packed = params.format == WeightFormat::kNVFP4;
    switch (params.hidden) {
    case 2048:
        return packed ? launchInstance<WeightFormat::kNVFP4, 2048>(params, raw, stream)
                      : launchInstance<WeightFormat::kBF16, 2048>(params, raw, stream);
    case 128:
        return packed ? launchInstance<WeightFormat::kNVFP4, 128>(params, raw, stream)
                      : launchInstance<WeightFormat::kBF16, 128>(params, raw, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
