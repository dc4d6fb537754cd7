// The QKV projection for up to eight tokens: a block has one panel of 16 rows, or two, its warps divide K. One token is
// normalised in every block; several have been by a kernel of their own.
#include "kernels/launch.h"
#include "kernels/norm.cuh"
#include "kernels/qkv_internal.h"

#include <type_traits>

namespace flint {

namespace {

/// Tiles that a block of two panels has ready before the wait: as many as registers hold.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kPAIR_READY = 4;
#else
constexpr int kPAIR_READY = 5;
#endif

/// How the kernel's instance for a format, H, and one or up to eight tokens divides the work.
template <WeightFormat F, int H, int TOKENS>
struct Shape {
    static constexpr int kPARTS = Split<F, H>::kSPLIT; ///< warps of a panel
    static constexpr int kTILES = Split<F, H>::kTILES;
    /// Half as many blocks normalise the token; and with few enough tiles ready before the wait, a block finds its
    /// registers beside one of the kernel before (the experts' down).
    static constexpr bool kPAIR = TOKENS == 1 && F == WeightFormat::kNVFP4 && (kPARTS > 1);
    static constexpr int kPANELS = kPAIR ? 2 : 1; ///< of a block
    static constexpr int kTHREADS = kPANELS * kPARTS * kWARP;
    static constexpr int kREADY = kTILES < 8 ? kTILES : kPAIR ? kPAIR_READY : 7; ///< tiles that a warp has ready
    static constexpr int kRESIDENT = kPAIR ? 2 : kREADY_BLOCKS<F>;               ///< blocks a multiprocessor
};

template <WeightFormat F, int H, int TOKENS>
struct ProjectShared {
    using S = Shape<F, H, TOKENS>;
    alignas(16) uint8_t x[SharedX<TOKENS>::bytes(H)];
    alignas(16) float partial[S::kPANELS][PartialSums::floats(S::kPARTS)];
    std::conditional_t<TOKENS == 1, NormScratch<H, S::kTHREADS>, uint8_t> norm;
};

/// Grid ((Hq + 2 Hkv) 128 / 16 / panels of a block). `x` [T, H]: of several tokens the normalised rows, ordered. raw
/// [T, N] bf16: the rounded projection.
template <WeightFormat F, int H, int TOKENS>
__global__ void __launch_bounds__(Shape<F, H, TOKENS>::kTHREADS, Shape<F, H, TOKENS>::kRESIDENT)
    qkvProjectKernel(QkvParams const params, bf16 const* x, bf16* raw) {
    using S = Shape<F, H, TOKENS>;
    constexpr int PARTS = S::kPARTS, PANELS = S::kPANELS, THREADS = S::kTHREADS;
    __shared__ ProjectShared<F, H, TOKENS> shared;
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, part = warp % PARTS, panel = warp / PARTS;
    int const first = blockIdx.x * PANELS, head = first * kPANEL_ROWS / kHEAD_DIM;

    SliceOf<F, H> slice;
    slice.template load<H>(params.weight + (first + panel) * panelBytes(F, H), part, lane);
    float scale = kRESTORE<F>;
    if (params.scale != nullptr) {
        scale *= __ldg(params.scale + (head >= params.heads) + (head >= params.heads + params.kv_heads));
    }
    allowSuccessor();
    ReadySlice<F, S::kTILES, S::kREADY> const ready(slice);
    ready.hold(params.tokens < 0, raw);
    float acc[1][4];
    if constexpr (TOKENS == 1) {
        shared.norm.prefetch(params.norm);
        waitForPredecessor();
        NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, 1};
        auto* const ordered = reinterpret_cast<uint32_t*>(shared.x);
        normalizeToken<H, THREADS>(norm, shared.norm, blockIdx.x == 0, ordered);
        ready.multiply(acc, part, SharedX<1>{reinterpret_cast<uint4 const*>(ordered), lane});
    } else {
        using X = StagedX<S::kTILES, TOKENS>;
        static_assert(PANELS == 1); // each warp stages its share of K
        X const mine{reinterpret_cast<uint4*>(shared.x) + part * X::kVECTORS, part, lane};
        waitForPredecessor();
        mine.template stage<true>(params.tokens, [&](int token) { return x + int64_t{token} * H; });
        ready.multiply(acc, part, mine);
    }
    PartialSums{shared.partial[panel]}.store(acc[0], part, lane);
    __syncthreads();
    constexpr int ROWS = PANELS * kPANEL_ROWS;
    int const rows = (params.heads + 2 * params.kv_heads) * kHEAD_DIM;
    for (int i = threadIdx.x; i < ROWS * params.tokens; i += THREADS) {
        int const row = i % ROWS, token = i / ROWS;
        PartialSums const partial{shared.partial[row / kPANEL_ROWS]};
        raw[token * rows + first * kPANEL_ROWS + row] =
            __float2bfloat16_rn(partial.sum(PARTS, row % kPANEL_ROWS, token) * scale);
    }
}

template <WeightFormat F, int H, int TOKENS>
cudaError_t launchTokens(QkvParams const& params, bf16 const* x, bf16* raw, cudaStream_t stream) {
    using S = Shape<F, H, TOKENS>;
    static_assert(kHEAD_DIM / kPANEL_ROWS % S::kPANELS == 0); // a block's rows have one tensor scale
    unsigned const panels = (params.heads + 2 * params.kv_heads) * (kHEAD_DIM / kPANEL_ROWS);
    auto const kernel = qkvProjectKernel<F, H, TOKENS>;
    dim3 const grid(panels / S::kPANELS), block(S::kTHREADS);
    return launchSpread(kSPREADS<F, TOKENS>, kernel, grid, block, 0, stream, params, x, raw);
}

template <WeightFormat F>
cudaError_t launchFormat(QkvParams const& params, bf16 const* x, bf16* raw, cudaStream_t stream) {
    switch (params.hidden) {
    case 2048:
        return params.tokens == 1 ? launchTokens<F, 2048, 1>(params, x, raw, stream)
                                  : launchTokens<F, 2048, kDECODE_TOKENS>(params, x, raw, stream);
    case 128:
        return params.tokens == 1 ? launchTokens<F, 128, 1>(params, x, raw, stream)
                                  : launchTokens<F, 128, kDECODE_TOKENS>(params, x, raw, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t launchQkvDecode(QkvParams const& params, bf16 const* x, bf16* raw, cudaStream_t stream) {
    return params.format == WeightFormat::kNVFP4 ? launchFormat<WeightFormat::kNVFP4>(params, x, raw, stream)
                                                 : launchFormat<WeightFormat::kBF16>(params, x, raw, stream);
}

} // namespace flint
