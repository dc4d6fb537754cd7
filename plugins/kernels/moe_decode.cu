// The experts of NormMoe's low-latency path, after moe_route.cu:
//   up:   gate, up and SwiGLU of each chosen expert
//   down: down projections of the chosen and the shared expert, combine
// Each block owns 16 rows of one matrix, so only the chosen experts' bytes move and nothing is scattered.
#include "kernels/launch.h"
#include "kernels/moe_internal.h"
#include "kernels/routing.cuh"
#include "kernels/swiglu.cuh"

namespace flint {

namespace {

/// Panels of gate and up that a block of several tokens takes: it stages the activations once for all of them.
constexpr int kUP_PANELS = 4;

/// gate and up of a panel to act, for every pair whose expert it is.
template <WeightFormat F, int PARTS, typename Chosen>
__device__ __forceinline__ void storeActivations(MoeParams const& params, MoeDecodeWorkspace const& work,
                                                 float const* sums, int expert, int panel, int firstPair, int pairs,
                                                 Chosen const& chosen) {
    PartialSums const partial{const_cast<float*>(sums)};
    float const gateScale = kRESTORE<F> * (params.up_scale == nullptr ? 1.0f : __ldg(params.up_scale + 2 * expert));
    float const upScale = kRESTORE<F> * (params.up_scale == nullptr ? 1.0f : __ldg(params.up_scale + 2 * expert + 1));
    for (int i = threadIdx.x; i < 8 * pairs; i += PARTS * kWARP) {
        int const row = i % 8, unit = panel * 8 + row, pair = firstPair + i / 8;
        if (chosen(pair)) {
            int const token = pair / kTOP_K;
            float const gate = partial.sum(PARTS, row, token) * gateScale;
            float const up = partial.sum(PARTS, row + 8, token) * upScale;
            work.act[int64_t{pair} * params.intermediate + unit / 16 * 16 + activationOrder(unit % 16)] =
                swigluRouted(gate, up);
        }
    }
}

/// One token. Grid (2 I / 16, 6): a panel of the expert in slot blockIdx.y.
template <WeightFormat F, int H, int E>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP)
    moeUpSingleKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    using X = StagedX<Split<F, H>::kTILES, 1>;
    __shared__ __align__(16) uint4 staged[PARTS * X::kVECTORS];
    __shared__ __align__(16) float sums[PartialSums::floats(PARTS)];
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP, slot = blockIdx.y;
    X const x{staged + part * X::kVECTORS, part, lane};
    waitForPredecessor();
    allowSuccessor(); // after the wait: the down kernel reads the routing before its own wait
    x.template stage<true>(1, [&](int) { return work.x; }); // while the logits come
    int const expert = routeSlot<E>(work.logits, slot, lane);
    SliceOf<F, H> slice;
    int64_t const panel = int64_t{expert} * (2 * params.intermediate / kPANEL_ROWS) + blockIdx.x;
    slice.template load<H>(params.up + panel * panelBytes(F, H), part, lane);
    // The activations are read behind a barrier, which the weights' loads cannot pass: else the assembler would move
    // each down to its use.
    __syncthreads();
    float acc[1][4];
    slice.multiply(acc, part, x);
    PartialSums{sums}.store(acc[0], part, lane);
    __syncthreads();
    // The only token's sums stand in column 0, whatever the slot.
    storeActivations<F, PARTS>(params, work, sums, expert, blockIdx.x, slot, 1, [](int) { return true; });
}

/// Several tokens. Grid (2 I / 16 / kUP_PANELS, min(E, 6 T)): some panels of the blockIdx.y-th distinct expert, the
/// next one's weights loaded before the present ones are multiplied.
template <WeightFormat F, int H>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP)
    moeUpKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    using X = StagedX<Split<F, H>::kTILES, kDECODE_TOKENS>;
    extern __shared__ __align__(16) uint4 staged[]; // each warp's activations
    __shared__ __align__(16) float sums[2][PartialSums::floats(PARTS)];
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP, index = blockIdx.y;
    waitForPredecessor();
    allowSuccessor(); // after the wait: the down kernel reads the routing before its own wait
    if (index >= __ldcg(&work.routes->count)) {
        return;
    }
    int const expert = __ldcg(work.routes->distinct + index);
    int const first = blockIdx.x * kUP_PANELS;
    uint8_t const* const panels =
        params.up + (int64_t{expert} * (2 * params.intermediate / kPANEL_ROWS) + first) * panelBytes(F, H);
    SliceOf<F, H> slice;
    slice.template load<H>(panels, part, lane);
    X const x{staged + part * X::kVECTORS, part, lane};
    x.template stage<true>(params.tokens, [&](int token) { return work.x + int64_t{token} * H; });
    for (int i = 0; i < kUP_PANELS; ++i) {
        float acc[1][4];
        slice.multiply(acc, part, x);
        if (i + 1 < kUP_PANELS) {
            slice.template load<H>(panels + (i + 1) * panelBytes(F, H), part, lane);
        }
        PartialSums{sums[i % 2]}.store(acc[0], part, lane);
        __syncthreads(); // one barrier a panel: the two sums alternate
        storeActivations<F, PARTS>(params, work, sums[i % 2], expert, first + i, 0, params.tokens * kTOP_K,
                                   [&](int pair) { return __ldcg(work.routes->expert + pair) == expert; });
    }
}

/// The shared expert's part of a panel: warps 0 .. kSPLIT - 1 of it divide K.
template <WeightFormat F, int S>
constexpr int kSHARED_WARPS = Split<F, S>::kSPLIT;

template <WeightFormat F, int I, int S>
constexpr int kSINGLE_WARPS = kTOP_K * Split<F, I>::kSPLIT + kSHARED_WARPS<F, S>;

/// One token. Grid (H / 16): a group of warps per chosen expert, in slot order, and one for the shared expert.
template <WeightFormat F, int E, int I, int S>
__global__ void __launch_bounds__(kSINGLE_WARPS<F, I, S>* kWARP, 1)
    moeDownSingleKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, I>::kSPLIT, SHARED_PARTS = Split<F, S>::kSPLIT;
    using X = StagedX<Split<F, I>::kTILES, 1>;
    __shared__ __align__(16) uint4 staged[kSINGLE_WARPS<F, I, S> * X::kVECTORS];
    __shared__ __align__(16) float sums[PartialSums::floats(kSINGLE_WARPS<F, I, S>)];
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, panel = blockIdx.x;
    int const panels = params.hidden / kPANEL_ROWS;
    bool const isShared = warp >= kTOP_K * PARTS;
    int const slot = isShared ? 0 : warp / PARTS, part = isShared ? warp - kTOP_K * PARTS : warp % PARTS;

    static_assert(Split<F, I>::kTILES == Split<F, S>::kTILES);
    SliceOf<F, I> slice;
    if (isShared) {
        slice.template load<S>(params.shared_down + panel * panelBytes(F, S), part, lane);
    }
    // The logits are complete, though the up kernel is not: it let this one start after its own wait for the router.
    Routes const routes = routeToken<E>(work.logits, lane);
    int expert = 0;
#pragma unroll
    for (int i = 0; i < kTOP_K; ++i) {
        expert = slot == i ? routes.expert[i] : expert;
    }
    if (!isShared) {
        slice.template load<I>(params.down + (int64_t{expert} * panels + panel) * panelBytes(F, I), part, lane);
    }
    float scales[kTOP_K];
#pragma unroll
    for (int i = 0; i < kTOP_K; ++i) {
        scales[i] = kRESTORE<F> * (params.down_scale == nullptr ? 1.0f : __ldg(params.down_scale + routes.expert[i]));
    }
    float const sharedScale =
        kRESTORE<F> * (params.shared_down_scale == nullptr ? 1.0f : __ldg(params.shared_down_scale));
    allowSuccessor();
    ReadySlice const ready(slice);
    ready.hold(params.tokens < 0, params.out);
    waitForPredecessor();

    bf16 const* const act = isShared ? work.shared_act : work.act + int64_t{slot} * I;
    X const x{staged + warp * X::kVECTORS, part, lane};
    x.template stage<true>(1, [&](int) { return act; });
    float acc[1][4];
    ready.multiply(acc, part, x);
    PartialSums{sums}.store(acc[0], warp, lane);
    __syncthreads();
    if (threadIdx.x < kPANEL_ROWS) {
        int const row = threadIdx.x;
        float routed = 0;
#pragma unroll
        for (int i = 0; i < kTOP_K; ++i) {
            PartialSums const theirs{sums + PartialSums::floats(i * PARTS)};
            routed += routes.weight[i] * roundBf16(theirs.sum(PARTS, row, 0) * scales[i]);
        }
        PartialSums const theirs{sums + PartialSums::floats(kTOP_K * PARTS)};
        float const sharedOut = roundBf16(theirs.sum(SHARED_PARTS, row, 0) * sharedScale);
        params.out[panel * kPANEL_ROWS + row] = __float2bfloat16_rn(roundBf16(routed) + sharedOut);
    }
}

/// Warps of a block of the kernel below that take experts: as many as registers allow.
template <WeightFormat F>
constexpr int kEXPERT_WARPS = F == WeightFormat::kNVFP4 ? 10 : 8;

/// Several tokens. Grid (H / 16): kEXPERT_WARPS warps take the distinct experts in turn, each a whole row of K, the
/// next one's weights loaded before the present ones are multiplied; the other warps take the shared expert.
template <WeightFormat F, int I, int S>
__global__ void __launch_bounds__((kEXPERT_WARPS<F> + kSHARED_WARPS<F, S>)*kWARP, 1)
    moeDownKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, I>::kSPLIT, SHARED_PARTS = Split<F, S>::kSPLIT;
    constexpr int EXPERT_WARPS = kEXPERT_WARPS<F>, WARPS = EXPERT_WARPS + SHARED_PARTS;
    static_assert(Split<F, I>::kTILES == Split<F, S>::kTILES);
    using X = StagedX<Split<F, I>::kTILES, kDECODE_TOKENS>;
    extern __shared__ __align__(16) uint4 staged[]; // each warp's activations
    __shared__ DecodeRoutes routes;
    __shared__ __align__(16) float sums[PartialSums::floats(SHARED_PARTS)];
    __shared__ float y[kDECODE_PAIRS][kPANEL_ROWS];
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, column = lane / 4, panel = blockIdx.x;
    int const panels = params.hidden / kPANEL_ROWS;
    int const sharedPart = warp - EXPERT_WARPS;
    auto const weights = [&](int expert) {
        return params.down + (int64_t{expert} * panels + panel) * panelBytes(F, I);
    };

    // The routing is complete: the up kernel let this one start after its own wait for it.
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(DecodeRoutes) / 4); i += WARPS * kWARP) {
        reinterpret_cast<int*>(&routes)[i] = __ldcg(reinterpret_cast<int const*>(work.routes) + i);
    }
    __syncthreads();
    SliceOf<F, I> slice;
    if (sharedPart >= 0) {
        slice.template load<S>(params.shared_down + panel * panelBytes(F, S), sharedPart, lane);
    } else if (warp < routes.count) {
        slice.template load<I>(weights(routes.distinct[warp]), 0, lane);
    }
    allowSuccessor();
    waitForPredecessor();

    X x{staged + warp * X::kVECTORS, sharedPart, lane};
    if (sharedPart >= 0) {
        x.template stage<true>(params.tokens, [&](int token) { return work.shared_act + int64_t{token} * S; });
        float acc[1][4];
        slice.multiply(acc, sharedPart, x);
        PartialSums{sums}.store(acc[0], sharedPart, lane);
    } else {
        for (int index = warp; index < routes.count; index += EXPERT_WARPS) {
            int const expert = routes.distinct[index];
            int pair = -1; // of this lane's column, if it chose the expert
            for (int slot = 0; column < params.tokens && slot < kTOP_K; ++slot) {
                pair = routes.expert[column * kTOP_K + slot] == expert ? column * kTOP_K + slot : pair;
            }
            auto const row = [&](int token) -> bf16 const* {
                int const theirs = __shfl_sync(0xFFFFFFFFu, pair, token * 4);
                return theirs < 0 ? nullptr : work.act + int64_t{theirs} * I;
            };
            float sum[4] = {};
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                __syncwarp(); // the tiles staged before have been read
                x.part = part;
                x.template stage<true>(kDECODE_TOKENS, row);
                float acc[1][4];
                slice.multiply(acc, part, x);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[i] += acc[0][i];
                }
                bool const last = part + 1 == PARTS;
                int const next = last ? index + EXPERT_WARPS : index;
                if (next < routes.count) {
                    slice.template load<I>(weights(routes.distinct[next]), last ? 0 : part + 1, lane);
                }
            }
            // Columns 2t, 2t + 1 of rows g, g + 8: y_e = r(acc * scale_e).
            float const scale = kRESTORE<F> * (params.down_scale == nullptr ? 1.0f : __ldg(params.down_scale + expert));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int const mine = __shfl_sync(0xFFFFFFFFu, pair, (lane % 4 * 2 + i % 2) * 4);
                if (mine >= 0) {
                    y[mine][lane / 4 + i / 2 * 8] = roundBf16(sum[i] * scale);
                }
            }
        }
    }
    __syncthreads();
    float const sharedScale = kRESTORE<F> * (params.shared_down_scale == nullptr ? 1.0f : *params.shared_down_scale);
    for (int i = threadIdx.x; i < params.tokens * kPANEL_ROWS; i += WARPS * kWARP) {
        int const token = i / kPANEL_ROWS, row = i % kPANEL_ROWS;
        float routed = 0;
#pragma unroll
        for (int slot = 0; slot < kTOP_K; ++slot) {
            routed += routes.weight[token * kTOP_K + slot] * y[token * kTOP_K + slot][row];
        }
        float const sharedOut = roundBf16(PartialSums{sums}.sum(SHARED_PARTS, row, token) * sharedScale);
        params.out[int64_t{token} * params.hidden + panel * kPANEL_ROWS + row] =
            __float2bfloat16_rn(roundBf16(routed) + sharedOut);
    }
}

/// Shared memory of the activations that `warps` warps stage for a weight with K columns.
template <WeightFormat F, int K>
constexpr size_t stagedBytes(int warps, int tokens) {
    return warps * tokens * StagedX<Split<F, K>::kTILES, 1>::kVECTORS * sizeof(uint4);
}

template <WeightFormat F, int H, int E, int I, int S>
cudaError_t launchShape(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    bool const single = params.tokens == 1;
    int const panels = 2 * I / kPANEL_ROWS, tokens = single ? 1 : kDECODE_TOKENS;
    static_assert(2 * I / kPANEL_ROWS % kUP_PANELS == 0);
    dim3 const block(Split<F, H>::kSPLIT * kWARP);
    cudaError_t error;
    if (single) {
        error = launchOverlapped(moeUpSingleKernel<F, H, E>, dim3(panels, kTOP_K), block, 0, stream, params, work);
    } else {
        auto const up = moeUpKernel<F, H>;
        size_t const bytes = stagedBytes<F, H>(Split<F, H>::kSPLIT, tokens);
        int const most = params.tokens * kTOP_K < E ? params.tokens * kTOP_K : E;
        if (error = allowShared(up, bytes); error == cudaSuccess) {
            error = launchOverlapped(up, dim3(panels / kUP_PANELS, most), block, bytes, stream, params, work);
        }
    }
    if (error != cudaSuccess) {
        return error;
    }
    auto const down = single ? moeDownSingleKernel<F, E, I, S> : moeDownKernel<F, I, S>;
    int const warps = single ? kSINGLE_WARPS<F, I, S> : kEXPERT_WARPS<F> + kSHARED_WARPS<F, S>;
    size_t const downBytes = single ? 0 : stagedBytes<F, I>(warps, tokens);
    if (error = allowShared(down, downBytes); error != cudaSuccess) {
        return error;
    }
    return launchOverlapped(down, dim3(H / kPANEL_ROWS), dim3(warps * kWARP), downBytes, stream, params, work);
}

template <WeightFormat F>
cudaError_t launchFormat(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    auto const is = [&](int hidden, int experts, int intermediate, int shared) {
        return params.hidden == hidden && params.experts == experts && params.intermediate == intermediate &&
               params.shared == shared;
    };
    if (is(2048, 256, 512, 1024)) {
        return launchShape<F, 2048, 256, 512, 1024>(params, work, stream);
    }
    if (is(2048, 16, 512, 1024)) { // Flint's widths with few experts, for tests
        return launchShape<F, 2048, 16, 512, 1024>(params, work, stream);
    }
    if (is(128, 16, 64, 64)) { // flint-nano
        return launchShape<F, 128, 16, 64, 64>(params, work, stream);
    }
    return cudaErrorInvalidValue;
}

} // namespace

cudaError_t launchMoeExperts(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    return params.format == WeightFormat::kNVFP4 ? launchFormat<WeightFormat::kNVFP4>(params, work, stream)
                                                 : launchFormat<WeightFormat::kBF16>(params, work, stream);
}

cudaError_t launchMoeDecode(MoeParams const& params, cudaStream_t stream) {
    MoeDecodeWorkspace const work = MoeDecodeWorkspace::layout(params);
    if (cudaError_t const error = launchMoeRoute(params, work, stream); error != cudaSuccess) {
        return error;
    }
    return launchMoeExperts(params, work, stream);
}

} // namespace flint
