#include "kernels/router.h"

#include "kernels/gemm.h"
#include "kernels/gemm_load.cuh"
#include "kernels/launch.h"
#include "kernels/router_operands.cuh"
#include "kernels/routing.cuh"

namespace flint {

namespace {

constexpr int kROUTER_WARPS = 8;
constexpr int kCHOICE_WARPS = 4;
constexpr int kEXPERT_ROWS = 16; ///< of a block
constexpr int kSTEP_COLUMNS = kROUTER_WARPS * kTILE_COLUMNS;
constexpr int kFEW_ROWS = 8;     ///< of a block, up to kSPLIT_TOKENS tokens
constexpr int kFEW_TILES = 4;    ///< K-tiles of a warp there, at most
constexpr int kFEW_TOKENS = 256; ///< up to here more blocks matter more than that each reads the weights again

/// Blocks of a multiprocessor that registers are for; two would spill on 10.x and 12.x.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kLOGITS_BLOCKS = 2;
#else
constexpr int kLOGITS_BLOCKS = 1;
#endif

/// Grid (ceil(T / (8 GROUPS)), E / 16): a block computes 16 experts for GROUPS groups of 8 tokens, its warps divide H.
/// Dynamic shared memory: a warp's K-tile of activations, [warps][TOKENS] 128-byte rows, swizzled. Enough blocks are
/// resident that one K-tile at a time will do.
template <typename R, int GROUPS>
__global__ void __launch_bounds__(kROUTER_WARPS* kWARP, kLOGITS_BLOCKS) routerLogitsKernel(RouterParams const params) {
    constexpr int TOKENS = 8 * GROUPS;
    constexpr int WARP_BYTES = TOKENS * 128, WARP_FLOATS = WARP_BYTES / 4;
    static_assert(kEXPERT_ROWS * TOKENS <= WARP_FLOATS);
    extern __shared__ __align__(128) uint8_t buffer[];
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, g = lane / 4, t = lane % 4;
    int const expert = blockIdx.y * kEXPERT_ROWS, first = blockIdx.x * TOKENS;
    R const* const row = static_cast<R const*>(params.weight) + int64_t{expert + g} * params.hidden + 16 * t;
    R const* const rowBelow = row + int64_t{8} * params.hidden;
    auto const load = [](uint4 const* source) {
        return loadNow16(source);
    };
    RouterTile<R> tile; // One ahead: the first does not depend on the kernel before this one.
    int column = warp * kTILE_COLUMNS;
    if (column < params.hidden) {
        tile.load(row + column, rowBelow + column, load);
    }
    waitForPredecessor();
    allowSuccessor(); // after the wait: the kernel behind this one may read x before its own
    uint32_t const x = sharedAddress(buffer) + warp * WARP_BYTES;
    float acc[GROUPS][4] = {};
    for (; column < params.hidden; column += kSTEP_COLUMNS) {
#pragma unroll 4 // more would take registers
        for (int i = 0; i < TOKENS; i += kWARP / 8) {
            int const token = i + lane / 8;
            if (first + token < params.tokens) { // other tokens' sums are not stored
                copyAsync16(gemmChunk(x, token, lane % 8),
                            params.x + int64_t{first + token} * params.hidden + column + lane % 8 * 8);
            }
        }
        commitCopies();
#pragma unroll
        for (int half = 0; half < 2; ++half) { // instructions 2 half and 2 half + 1: fewer registers than all at once
            uint32_t a[kROUTER_PARTS<R>][2][4];
            tile.operands(a, 2 * half);
            if (half == 0) {
                waitCopies<0>();
                __syncwarp(); // a warp reads only what its lanes copied
            } else if (int const next = column + kSTEP_COLUMNS; next < params.hidden) {
                tile.load(row + next, rowBelow + next, load);
            }
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                uint32_t b[4];
                ldmatrix4(b, gemmChunk(x, group * 8 + lane % 8, half * 4 + lane / 8));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int part = kROUTER_PARTS<R> - 1; part >= 0; --part) { // small parts first
                        mma16816(acc[group], a[part][i], b[2 * i], b[2 * i + 1]);
                    }
                }
            }
        }
        __syncwarp(); // it has been read
    }
    // [experts][TOKENS], where this warp's activations were.
    float* const sums = reinterpret_cast<float*>(buffer);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[warp * WARP_FLOATS + (g + i / 2 * 8) * TOKENS + group * 8 + 2 * t + i % 2] = acc[group][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kEXPERT_ROWS * TOKENS; i += kROUTER_WARPS * kWARP) {
        int const place = i % kEXPERT_ROWS, token = i / kEXPERT_ROWS;
        if (first + token < params.tokens) {
            float logit = 0;
#pragma unroll
            for (int part = 0; part < kROUTER_WARPS; ++part) {
                logit += sums[part * WARP_FLOATS + place * TOKENS + token];
            }
            params.logits[int64_t{first + token} * params.experts + expert + place] = logit;
        }
    }
}

/// The same for up to kSPLIT_TOKENS tokens, every sum in the same order. Grid (ceil(T / (8 GROUPS)), E / 8): a block
/// computes 8 experts, half of what the matrix instruction takes, so that there are enough blocks. All weights are
/// under way before the wait. Dynamic shared memory: activations [warps][K-tiles][TOKENS], 128-byte rows, swizzled.
template <typename R, int GROUPS>
__global__ void __launch_bounds__(kROUTER_WARPS* kWARP) routerFewLogitsKernel(RouterParams const params) {
    constexpr int TOKENS = 8 * GROUPS, TILE_BYTES = TOKENS * 128;
    extern __shared__ __align__(128) uint8_t buffer[];
    __shared__ float sums[kROUTER_WARPS][kFEW_ROWS][TOKENS];
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, g = lane / 4, t = lane % 4;
    int const expert = blockIdx.y * kFEW_ROWS, first = blockIdx.x * TOKENS, column = warp * kTILE_COLUMNS;
    R const* const row = static_cast<R const*>(params.weight) + int64_t{expert + g} * params.hidden + column + 16 * t;
    RouterTile<R, 1> tiles[kFEW_TILES];
#pragma unroll
    for (int i = 0; i < kFEW_TILES; ++i) {
        if (column + i * kSTEP_COLUMNS < params.hidden) {
            R const* const source = row + i * kSTEP_COLUMNS;
            tiles[i].load(source, source, [](uint4 const* data) { return loadNow16(data); });
        }
    }
    waitForPredecessor();
    allowSuccessor(); // after the wait: the kernel behind this one may read x before its own
    uint32_t const x = sharedAddress(buffer) + warp * kFEW_TILES * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < kFEW_TILES; ++i) {
        int const start = column + i * kSTEP_COLUMNS;
#pragma unroll
        for (int token = lane / 8; token < TOKENS; token += kWARP / 8) {
            if (start < params.hidden && first + token < params.tokens) { // other tokens' sums are not stored
                copyAsync16(gemmChunk(x + i * TILE_BYTES, token, lane % 8),
                            params.x + int64_t{first + token} * params.hidden + start + lane % 8 * 8);
            }
        }
    }
    commitCopies();
    waitCopies<0>();
    __syncwarp(); // a warp reads only what its lanes copied
    float acc[GROUPS][4] = {};
#pragma unroll
    for (int i = 0; i < kFEW_TILES; ++i) {
        if (column + i * kSTEP_COLUMNS >= params.hidden) {
            break;
        }
        uint32_t a[kROUTER_PARTS<R>][4][4];
        tiles[i].operands(a);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t b[4]; // of instructions 2 half and 2 half + 1
                ldmatrix4(b, gemmChunk(x + i * TILE_BYTES, group * 8 + lane % 8, half * 4 + lane / 8));
#pragma unroll
                for (int j = 0; j < 2; ++j) {
#pragma unroll
                    for (int part = kROUTER_PARTS<R> - 1; part >= 0; --part) { // small parts first
                        mma16816(acc[group], a[part][2 * half + j], b[2 * j], b[2 * j + 1]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        sums[warp][g][group * 8 + 2 * t] = acc[group][0];
        sums[warp][g][group * 8 + 2 * t + 1] = acc[group][1];
    }
    __syncthreads();
    int const place = threadIdx.x % kFEW_ROWS, token = threadIdx.x / kFEW_ROWS;
    if (token < TOKENS && first + token < params.tokens) {
        float logit = 0;
#pragma unroll
        for (int part = 0; part < kROUTER_WARPS; ++part) {
            logit += sums[part][place][token];
        }
        params.logits[int64_t{first + token} * params.experts + expert + place] = logit;
    }
}

/// Grid (ceil(T / warps)): a warp routes a token.
template <int E>
__global__ void __launch_bounds__(kCHOICE_WARPS* kWARP) routerChoiceKernel(RouterChoiceParams const params) {
    waitForPredecessor();
    allowSuccessor();
    int const lane = threadIdx.x % kWARP, token = blockIdx.x * kCHOICE_WARPS + threadIdx.x / kWARP;
    if (token >= params.tokens) {
        return;
    }
    Routes const routes = routeToken<E>(params.logits + int64_t{token} * E, lane);
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        if (lane == slot) {
            params.experts[int64_t{token} * kTOP_K + slot] = routes.expert[slot];
            params.weights[int64_t{token} * kTOP_K + slot] = routes.weight[slot];
        }
    }
}

template <typename R, int GROUPS>
cudaError_t launchLogits(RouterParams const& params, cudaStream_t stream) {
    auto const kernel = routerLogitsKernel<R, GROUPS>;
    constexpr size_t BYTES = kROUTER_WARPS * 8 * GROUPS * 128;
    if (cudaError_t const status = allowShared(kernel, BYTES); status != cudaSuccess) {
        return status;
    }
    dim3 const grid((params.tokens + 8 * GROUPS - 1) / (8 * GROUPS), params.experts / kEXPERT_ROWS);
    return launchOverlapped(kernel, grid, dim3(kROUTER_WARPS * kWARP), BYTES, stream, params);
}

template <typename R, int GROUPS>
cudaError_t launchFewLogits(RouterParams const& params, cudaStream_t stream) {
    auto const kernel = routerFewLogitsKernel<R, GROUPS>;
    constexpr size_t BYTES = kROUTER_WARPS * kFEW_TILES * 8 * GROUPS * 128;
    if (cudaError_t const status = allowShared(kernel, BYTES); status != cudaSuccess) {
        return status;
    }
    dim3 const grid((params.tokens + 8 * GROUPS - 1) / (8 * GROUPS), params.experts / kFEW_ROWS);
    return launchOverlapped(kernel, grid, dim3(kROUTER_WARPS * kWARP), BYTES, stream, params);
}

template <typename R>
cudaError_t launchLogits(RouterParams const& params, cudaStream_t stream) {
    if (params.tokens <= kSPLIT_TOKENS) {
        return params.tokens <= 32 ? launchFewLogits<R, 1>(params, stream) : launchFewLogits<R, 2>(params, stream);
    }
    return params.tokens <= kFEW_TOKENS ? launchLogits<R, 4>(params, stream) : launchLogits<R, 8>(params, stream);
}

} // namespace

cudaError_t launchRouterLogits(RouterParams const& params, cudaStream_t stream) {
    if (params.hidden % kTILE_COLUMNS != 0 || params.experts % kEXPERT_ROWS != 0 ||
        (params.tokens <= kSPLIT_TOKENS && params.hidden > kFEW_TILES * kSTEP_COLUMNS)) {
        return cudaErrorInvalidValue;
    }
    return params.f32 ? launchLogits<float>(params, stream) : launchLogits<bf16>(params, stream);
}

cudaError_t launchRouterChoice(RouterChoiceParams const& params, cudaStream_t stream) {
    dim3 const block(kCHOICE_WARPS * kWARP), choiceGrid((params.tokens + kCHOICE_WARPS - 1) / kCHOICE_WARPS);
    switch (params.experts_count) {
    case 256:
        return launchOverlapped(routerChoiceKernel<256>, choiceGrid, block, 0, stream, params);
    case 16:
        return launchOverlapped(routerChoiceKernel<16>, choiceGrid, block, 0, stream, params);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
