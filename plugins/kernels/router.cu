#include "kernels/router.h"

#include "kernels/launch.h"
#include "kernels/router_operands.cuh"
#include "kernels/routing.cuh"

namespace flint {

namespace {

constexpr int kROUTER_WARPS = 8;
constexpr int kCHOICE_WARPS = 4;
constexpr int kEXPERT_ROWS = 16; ///< of a block
constexpr int kFEW_TOKENS = 256; ///< up to here more blocks matter more than that each reads the weights again

/// Grid (ceil(T / (8 GROUPS)), E / 16): a block computes 16 experts for GROUPS groups of 8 tokens, its warps divide H.
template <typename R, int GROUPS>
__global__ void __launch_bounds__(kROUTER_WARPS* kWARP) routerLogitsKernel(RouterParams const params) {
    constexpr int TOKENS = 8 * GROUPS;
    __shared__ float sums[kROUTER_WARPS][kEXPERT_ROWS][TOKENS];
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
    allowSuccessor();
    waitForPredecessor();
    bf16 const* x[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        int const token = first + group * 8 + g;
        x[group] = params.x + int64_t{min(token, params.tokens - 1)} * params.hidden + 2 * t;
    }
    float acc[GROUPS][4] = {};
    for (; column < params.hidden; column += kROUTER_WARPS * kTILE_COLUMNS) {
        uint32_t a[kROUTER_PARTS<R>][4][4];
        tile.operands(a);
        int const next = column + kROUTER_WARPS * kTILE_COLUMNS;
        if (next < params.hidden) {
            tile.load(row + next, rowBelow + next, load);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                auto const* const words = reinterpret_cast<uint32_t const*>(x[group] + column + 16 * i);
                uint32_t const b0 = words[0], b1 = words[4];
#pragma unroll
                for (int part = kROUTER_PARTS<R> - 1; part >= 0; --part) { // small parts first
                    mma16816(acc[group], a[part][i], b0, b1);
                }
            }
        }
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[warp][g + i / 2 * 8][group * 8 + 2 * t + i % 2] = acc[group][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kEXPERT_ROWS * TOKENS; i += kROUTER_WARPS * kWARP) {
        int const place = i % kEXPERT_ROWS, token = i / kEXPERT_ROWS;
        if (first + token < params.tokens) {
            float logit = 0;
#pragma unroll
            for (int part = 0; part < kROUTER_WARPS; ++part) {
                logit += sums[part][place][token];
            }
            params.logits[int64_t{first + token} * params.experts_count + expert + place] = logit;
        }
    }
}

/// Grid (ceil(T / warps)): a warp routes a token.
template <int E>
__global__ void __launch_bounds__(kCHOICE_WARPS* kWARP) routerChoiceKernel(RouterParams const params) {
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
    dim3 const grid((params.tokens + 8 * GROUPS - 1) / (8 * GROUPS), params.experts_count / kEXPERT_ROWS);
    return launchOverlapped(routerLogitsKernel<R, GROUPS>, grid, dim3(kROUTER_WARPS * kWARP), 0, stream, params);
}

template <typename R>
cudaError_t launchLogits(RouterParams const& params, cudaStream_t stream) {
    return params.tokens <= kFEW_TOKENS ? launchLogits<R, 4>(params, stream) : launchLogits<R, 8>(params, stream);
}

} // namespace

cudaError_t launchRouter(RouterParams const& params, cudaStream_t stream) {
    cudaError_t const error = params.f32 ? launchLogits<float>(params, stream) : launchLogits<bf16>(params, stream);
    if (error != cudaSuccess) {
        return error;
    }
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
