// Linear for up to eight tokens: one block per panel of 16 rows, its warps divide K.
#include "kernels/launch.h"
#include "kernels/linear.h"
#include "kernels/slice.cuh"

namespace flint {

namespace {

/// How a block of one token leaves registers to others: with few enough tiles ready before the wait it finds its own
/// beside a block of the windows' attention kernel before it.
template <WeightFormat F, int K, int TOKENS>
struct LinearShape {
    static constexpr bool kSHARES = TOKENS == 1 && F == WeightFormat::kNVFP4 && Split<F, K>::kSPLIT == 8;
    static constexpr int kREADY = kSHARES ? 5 : Split<F, K>::kTILES; ///< tiles
    static constexpr int kRESIDENT = kSHARES ? 2 : 0;                ///< blocks a multiprocessor; 0: any number
};

/// Grid (N / 16); kSPLIT warps a block. Dynamic shared memory: each warp's activations.
template <WeightFormat F, int K, int TOKENS, bool ORDERED>
__global__ void __launch_bounds__(Split<F, K>::kSPLIT* kWARP, LinearShape<F, K, TOKENS>::kRESIDENT)
    linearDecodeKernel(LinearParams const params) {
    constexpr int PARTS = Split<F, K>::kSPLIT;
    using X = StagedX<Split<F, K>::kTILES, TOKENS>;
    extern __shared__ __align__(16) uint4 staged[];
    __shared__ __align__(16) float sums[PartialSums::floats(PARTS)];
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;

    SliceOf<F, K> slice;
    slice.template load<K>(params.weight + blockIdx.x * panelBytes(F, K), part, lane);
    float const scale = kRESTORE<F> * (params.scale == nullptr ? 1.0f : __ldg(params.scale));
    allowSuccessor();
    ReadySlice<F, Split<F, K>::kTILES, LinearShape<F, K, TOKENS>::kREADY> const ready(slice);
    ready.hold(params.tokens < 0, params.y);
    waitForPredecessor();

    X const x{staged + part * X::kVECTORS, part, lane};
    x.template stage<ORDERED>(params.tokens, [&](int token) { return params.x + int64_t{token} * K; });
    float acc[1][4];
    ready.multiply(acc, part, x);
    PartialSums const partial{sums};
    partial.store(acc[0], part, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < kPANEL_ROWS * params.tokens; i += PARTS * kWARP) {
        int const row = i % kPANEL_ROWS, token = i / kPANEL_ROWS;
        params.y[int64_t{token} * params.rows + blockIdx.x * kPANEL_ROWS + row] =
            __float2bfloat16_rn(partial.sum(PARTS, row, token) * scale);
    }
}

template <WeightFormat F, int K, int TOKENS>
constexpr size_t kSTAGED_BYTES = Split<F, K>::kSPLIT * StagedX<Split<F, K>::kTILES, TOKENS>::kVECTORS * sizeof(uint4);

/// Dynamic and static shared memory of a block.
template <WeightFormat F, int K, int TOKENS>
constexpr size_t kSHARED_BYTES = kSTAGED_BYTES<F, K, TOKENS> + PartialSums::floats(Split<F, K>::kSPLIT) * sizeof(float);

template <WeightFormat F, int K, int TOKENS, bool ORDERED>
cudaError_t launchTokens(LinearParams const& params, cudaStream_t stream) {
    auto const kernel = linearDecodeKernel<F, K, TOKENS, ORDERED>;
    constexpr int PARTS = Split<F, K>::kSPLIT;
    constexpr size_t BYTES = kSTAGED_BYTES<F, K, TOKENS>;
    dim3 const grid(params.rows / kPANEL_ROWS), block(PARTS * kWARP);
    return launchSpread(kSPREADS<F, TOKENS>, kernel, grid, block, BYTES, stream, params);
}

/// Token after token: the same bits, as a token is a column of the products by itself.
template <WeightFormat F, int K, bool ORDERED>
cudaError_t launchEachToken(LinearParams const& params, cudaStream_t stream) {
    LinearParams one = params;
    one.tokens = 1;
    for (int token = 0; token < params.tokens; ++token) {
        one.x = params.x + int64_t{token} * params.columns;
        one.y = params.y + int64_t{token} * params.rows;
        if (cudaError_t const error = launchTokens<F, K, 1, ORDERED>(one, stream); error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

template <WeightFormat F, int K, bool ORDERED>
cudaError_t launchInstance(LinearParams const& params, cudaStream_t stream) {
    static_assert(kSHARED_BYTES<F, K, 1> <= kCOMMON_SHARED_BYTES);
    if (params.ordered != ORDERED) {
        return cudaErrorInvalidValue;
    }
    if (params.tokens == 1) {
        return launchTokens<F, K, 1, ORDERED>(params, stream);
    }
    if constexpr (kSHARED_BYTES<F, K, kDECODE_TOKENS> > kCOMMON_SHARED_BYTES) {
        int available = 0;
        if (cudaError_t const error = blockSharedBytes(available); error != cudaSuccess) {
            return error;
        }
        if (static_cast<size_t>(available) < kSHARED_BYTES<F, K, kDECODE_TOKENS>) {
            return launchEachToken<F, K, ORDERED>(params, stream);
        }
    }
    return launchTokens<F, K, kDECODE_TOKENS, ORDERED>(params, stream);
}

template <WeightFormat F>
cudaError_t launchFormat(LinearParams const& params, cudaStream_t stream) {
    switch (params.columns) {
    case 4096: // output projection: 32 heads
        return launchInstance<F, 4096, false>(params, stream);
    case 6144: // dense MLP
        return launchInstance<F, 6144, true>(params, stream);
    case 2048: // flint-nano's output projection: 16 heads
        return launchInstance<F, 2048, false>(params, stream);
    case 256: // flint-nano's dense MLP
        return launchInstance<F, 256, true>(params, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

bool hasLinearDecode(int columns) {
    return columns == 4096 || columns == 2048;
}

cudaError_t launchLinearDecode(LinearParams const& params, cudaStream_t stream) {
    return params.format == WeightFormat::kNVFP4 ? launchFormat<WeightFormat::kNVFP4>(params, stream)
                                                 : launchFormat<WeightFormat::kBF16>(params, stream);
}

} // namespace flint
