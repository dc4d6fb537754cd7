// NormQkvRope for up to eight tokens: one cluster of eight blocks per head, one block per panel of 16 rows.
#include "kernels/qkv_internal.h"

#include "kernels/kv_write.cuh"
#include "kernels/launch.h"
#include "kernels/norm.cuh"

#include <cooperative_groups.h>

namespace flint {

namespace {

namespace cg = cooperative_groups;

constexpr int kCLUSTER = kHEAD_DIM / kPANEL_ROWS;

template <WeightFormat F, int H, int TOKENS>
struct QkvShared {
    alignas(16) uint32_t x[SharedX<TOKENS>::bytes(H) / 4];
    float partial[PartialSums::floats(Split<F, H>::kSPLIT)];
    float sums[Split<F, H>::kSPLIT];
    float values[kPANEL_ROWS][kDECODE_TOKENS]; ///< this panel's rows, rounded to BF16
    float squares[kDECODE_TOKENS];             ///< over this panel's rows
};

/// Grid ((Hq + 2 Hkv) * 8), clusters of 8; kSPLIT warps a block.
template <WeightFormat F, int H, int TOKENS>
__global__ void __cluster_dims__(kCLUSTER, 1, 1) __launch_bounds__(Split<F, H>::kSPLIT* kWARP)
    qkvDecodeKernel(QkvParams const params) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    constexpr int THREADS = PARTS * kWARP;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<QkvShared<F, H, TOKENS>*>(raw);
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;
    int const head = blockIdx.x / kCLUSTER, rank = blockIdx.x % kCLUSTER;

    SliceOf<F, H> slice;
    slice.template load<H>(params.weight + blockIdx.x * panelBytes(F, H), part, lane);
    waitForPredecessor();
    allowSuccessor();

    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    normalizeRows<H, TOKENS, THREADS>(norm, blockIdx.x == 0, shared.x, shared.sums);

    float acc[1][4] = {};
    slice.multiply(acc, part, SharedX<TOKENS>{reinterpret_cast<uint4 const*>(shared.x), lane});
    PartialSums const partial{shared.partial};
    partial.store(acc[0], part, lane);
    __syncthreads();

    bool const isQ = head < params.heads, isK = !isQ && head < params.heads + params.kv_heads;
    float scale = kRESTORE<F>;
    if (params.scale != nullptr) {
        scale *= params.scale[isQ ? 0 : isK ? 1 : 2];
    }
    for (int i = threadIdx.x; i < kPANEL_ROWS * kDECODE_TOKENS; i += THREADS) {
        int const row = i / kDECODE_TOKENS, token = i % kDECODE_TOKENS;
        shared.values[row][token] = roundBf16(partial.sum(PARTS, row, token) * scale);
    }
    __syncthreads();
    if (threadIdx.x < kDECODE_TOKENS) {
        float squares = 0;
        for (int row = 0; row < kPANEL_ROWS; ++row) {
            squares += shared.values[row][threadIdx.x] * shared.values[row][threadIdx.x];
        }
        shared.squares[threadIdx.x] = squares;
    }
    cg::cluster_group const cluster = cg::this_cluster();
    cluster.sync();

    // RoPE pairs d with d + 64: the panel four ranks away.
    auto const& partner = *cluster.map_shared_rank(&shared, rank ^ (kCLUSTER / 2));
    for (int i = threadIdx.x; i < kPANEL_ROWS * TOKENS; i += THREADS) {
        int const token = i / kPANEL_ROWS, row = i % kPANEL_ROWS, dim = rank * kPANEL_ROWS + row;
        if (token >= params.tokens) {
            break;
        }
        float value = shared.values[row][token];
        int const position = params.positions[token];
        if (isQ || isK) {
            float squares = 0;
            for (int other = 0; other < kCLUSTER; ++other) {
                squares += cluster.map_shared_rank(&shared, other)->squares[token];
            }
            float const inverse = rsqrtf(squares / kHEAD_DIM + params.eps);
            float const* const weight = isQ ? params.q_norm : params.k_norm;
            value = roundBf16(value * inverse * weight[dim]);
            if (params.rope != nullptr) {
                float const other = roundBf16(partner.values[row][token] * inverse * weight[dim ^ (kHEAD_DIM / 2)]);
                value = rotate(value, other, params.rope + int64_t{position} * kHEAD_DIM, dim);
            }
        }
        bf16 const rounded = __float2bfloat16_rn(value);
        if (isQ) {
            params.q[(int64_t{token} * params.heads + head) * kHEAD_DIM + dim] = rounded;
        } else {
            int const kvHead = head - params.heads - (isK ? 0 : params.kv_heads);
            bf16* const vector = kvVector(params.kv, token, position, kvHead, isK ? 0 : 1);
            if (vector != nullptr) {
                vector[dim] = rounded;
            }
        }
    }
    cluster.sync(); // other blocks may still read this one's shared memory
}

template <WeightFormat F, int H, int TOKENS>
cudaError_t launchInstance(QkvParams const& params, cudaStream_t stream) {
    auto const kernel = qkvDecodeKernel<F, H, TOKENS>;
    constexpr size_t BYTES = sizeof(QkvShared<F, H, TOKENS>);
    if (cudaError_t const error = allowShared(kernel, BYTES); error != cudaSuccess) {
        return error;
    }
    unsigned const blocks = (params.heads + 2 * params.kv_heads) * kCLUSTER;
    return launchOverlapped(kernel, dim3(blocks), dim3(Split<F, H>::kSPLIT * kWARP), BYTES, stream, params);
}

template <WeightFormat F, int H>
cudaError_t launchFormat(QkvParams const& params, cudaStream_t stream) {
    return params.tokens == 1 ? launchInstance<F, H, 1>(params, stream) : launchInstance<F, H, 8>(params, stream);
}

} // namespace

cudaError_t launchQkvDecode(QkvParams const& params, cudaStream_t stream) {
    bool const packed = params.format == WeightFormat::kNVFP4;
    switch (params.hidden) {
    case 2048:
        return packed ? launchFormat<WeightFormat::kNVFP4, 2048>(params, stream)
                      : launchFormat<WeightFormat::kBF16, 2048>(params, stream);
    case 128:
        return packed ? launchFormat<WeightFormat::kNVFP4, 128>(params, stream)
                      : launchFormat<WeightFormat::kBF16, 128>(params, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
