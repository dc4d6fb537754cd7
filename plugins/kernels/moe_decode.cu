// NormMoe for up to eight tokens, in three kernels that overlap:
//   route: norm; router logits; the shared expert's gate, up and SwiGLU
//   up:    top-6; gate, up and SwiGLU of each chosen expert
//   down:  down projections of the chosen and the shared expert, combine
// Each block owns 16 rows of one matrix, so only the chosen experts' bytes move and nothing is scattered. The routing
// is cheap enough for every block to do again; that saves a kernel.
#include "kernels/launch.h"
#include "kernels/moe_internal.h"
#include "kernels/norm.cuh"
#include "kernels/routing.cuh"
#include "kernels/swiglu.cuh"

namespace flint {

namespace {

constexpr int kPAIRS = kDECODE_TOKENS * kTOP_K; ///< (token, slot) pairs

template <WeightFormat F, int H, int TOKENS>
struct RouteShared {
    alignas(16) uint32_t x[SharedX<TOKENS>::bytes(H) / 4];
    float partial[PartialSums::floats(Split<F, H>::kSPLIT)];
    float sums[Split<F, H>::kSPLIT];
};

/// A router row in registers: every lane holds 8 columns of each 256.
template <typename R, int H>
struct RouterRow {
    static constexpr int kCHUNKS = (H + kWARP * kNORM_COLUMNS - 1) / (kWARP * kNORM_COLUMNS);
    static constexpr int kVECTORS = sizeof(R) / 2; ///< 16-byte loads per 8 columns
    uint4 data[kCHUNKS][kVECTORS];

    __device__ __forceinline__ static int column(int chunk, int lane) { return (chunk * kWARP + lane) * kNORM_COLUMNS; }

    __device__ __forceinline__ void load(R const* row, int lane) {
#pragma unroll
        for (int chunk = 0; chunk < kCHUNKS; ++chunk) {
            if (column(chunk, lane) < H) {
#pragma unroll
                for (int i = 0; i < kVECTORS; ++i) {
                    data[chunk][i] = loadStreaming(reinterpret_cast<uint4 const*>(row + column(chunk, lane)) + i);
                }
            }
        }
    }

    __device__ __forceinline__ float weight(int chunk, int index) const {
        auto const* const words = reinterpret_cast<uint32_t const*>(data[chunk]);
        if constexpr (sizeof(R) == 4) {
            return __uint_as_float(words[index]);
        } else {
            float2 const pair = unpackBf16(words[index / 2]);
            return index % 2 == 0 ? pair.x : pair.y;
        }
    }

    /// Dot product with a token's normalised row.
    template <int TOKENS>
    __device__ __forceinline__ float dot(uint32_t const* x, int token, int lane) const {
        float sum = 0;
#pragma unroll
        for (int chunk = 0; chunk < kCHUNKS; ++chunk) {
            int const first = column(chunk, lane);
            if (first < H) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    constexpr int STARTS[4] = {0, 1, 4, 5};
                    float2 const pair = unpackBf16(x[SharedX<TOKENS>::word(token, first + STARTS[i])]);
                    sum += pair.x * weight(chunk, STARTS[i]) + pair.y * weight(chunk, STARTS[i] + 2);
                }
            }
        }
        return warpSum(sum);
    }
};

/// Grid (2 S / 16 + ceil(E / kSPLIT)): first the shared expert's panels, then one router row per warp.
template <WeightFormat F, typename R, int H, int TOKENS>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP)
    moeRouteKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    constexpr int THREADS = PARTS * kWARP;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<RouteShared<F, H, TOKENS>*>(raw);
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;
    int const panels = 2 * params.shared / kPANEL_ROWS, panel = blockIdx.x;
    bool const isRouter = panel >= panels;
    int const expert = (panel - panels) * PARTS + part;

    SliceOf<F, H> slice;
    RouterRow<R, H> row;
    if (!isRouter) {
        slice.template load<H>(params.shared_up + panel * panelBytes(F, H), part, lane);
    } else if (expert < params.experts) {
        row.load(static_cast<R const*>(params.router) + int64_t{expert} * H, lane);
    }
    waitForPredecessor();
    allowSuccessor();

    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    bool const first = blockIdx.x == 0;
    auto const same = [](int token) {
        return token;
    };
    normalizeRows<H, TOKENS, THREADS>(
        norm, first, shared.x, shared.sums, same, [&](int token, int column, uint4 pairs) {
            if (first) {
                uint32_t* const target =
                    reinterpret_cast<uint32_t*>(work.x + int64_t{token} * H + column / 16 * 16) + column % 16 / 8;
                target[0] = pairs.x; // pairs at places 0, 4, 8, 12 of the 16, or 2, 6, 10, 14
                target[2] = pairs.y;
                target[4] = pairs.z;
                target[6] = pairs.w;
            }
        });
    if (isRouter) {
        if (expert < params.experts) {
            for (int token = 0; token < TOKENS && token < params.tokens; ++token) {
                float const logit = row.template dot<TOKENS>(shared.x, token, lane);
                if (lane == 0) {
                    work.logits[token * params.experts + expert] = logit;
                }
            }
        }
        return;
    }
    float acc[1][4] = {};
    slice.multiply(acc, part, SharedX<TOKENS>{reinterpret_cast<uint4 const*>(shared.x), lane});
    PartialSums const partial{shared.partial};
    partial.store(acc[0], part, lane);
    __syncthreads();
    float const gateScale = kRESTORE<F> * (params.shared_up_scale == nullptr ? 1.0f : params.shared_up_scale[0]);
    float const upScale = kRESTORE<F> * (params.shared_up_scale == nullptr ? 1.0f : params.shared_up_scale[1]);
    for (int i = threadIdx.x; i < 8 * params.tokens; i += THREADS) {
        int const unitRow = i % 8, token = i / 8, unit = panel * 8 + unitRow;
        float const gate = partial.sum(PARTS, unitRow, token) * gateScale;
        float const up = partial.sum(PARTS, unitRow + 8, token) * upScale;
        work.shared_act[int64_t{token} * params.shared + unit / 16 * 16 + activationOrder(unit % 16)] =
            swigluRounded(gate, up);
    }
}

/// The routing of all tokens, by a whole block, in shared memory.
struct BlockRoutes {
    int expert[kPAIRS];
    float weight[kPAIRS];
    int distinct[kPAIRS]; ///< experts, each once, by first appearance
    int count;

    template <int E>
    __device__ void fill(float const* logits, int tokens, int warps) {
        int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP;
        for (int token = warp; token < tokens; token += warps) {
            Routes const routes = routeToken<E>(logits + token * E, lane);
#pragma unroll
            for (int slot = 0; slot < kTOP_K; ++slot) {
                if (lane == slot) {
                    expert[token * kTOP_K + slot] = routes.expert[slot];
                    weight[token * kTOP_K + slot] = routes.weight[slot];
                }
            }
        }
        __syncthreads();
        if (warp == 0) {
            int before = 0;
            for (int first = 0; first < tokens * kTOP_K; first += kWARP) {
                int const pair = first + lane;
                bool isNew = pair < tokens * kTOP_K;
                for (int other = 0; isNew && other < pair; ++other) {
                    isNew = expert[other] != expert[pair];
                }
                unsigned const news = __ballot_sync(0xFFFFFFFFu, isNew);
                if (isNew) {
                    distinct[before + __popc(news & ((1u << lane) - 1))] = expert[pair];
                }
                before += __popc(news);
            }
            if (lane == 0) {
                count = before;
            }
        }
        __syncthreads();
    }
};

/// Grid (2 I / 16, min(E, 6 T)): a panel of the blockIdx.y-th distinct expert.
template <WeightFormat F, int H, int E>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP)
    moeUpKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    __shared__ BlockRoutes routes;
    __shared__ __align__(16) float sums[PartialSums::floats(PARTS)];
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;
    waitForPredecessor();
    allowSuccessor(); // after the wait: the down kernel reads the router's logits before its own wait
    routes.fill<E>(work.logits, params.tokens, PARTS);
    if (static_cast<int>(blockIdx.y) >= routes.count) {
        return;
    }
    int const expert = routes.distinct[blockIdx.y];

    SliceOf<F, H> slice;
    int64_t const panel = int64_t{expert} * (2 * params.intermediate / kPANEL_ROWS) + blockIdx.x;
    slice.template load<H>(params.up + panel * panelBytes(F, H), part, lane);
    __syncthreads(); // keeps the compiler from moving loads down to their uses
    int const column = lane / 4;
    float acc[1][4] = {};
    slice.multiply(acc, part, OrderedX{column < params.tokens ? work.x + int64_t{column} * H : nullptr, lane});
    PartialSums const partial{sums};
    partial.store(acc[0], part, lane);
    __syncthreads();
    float const gateScale = kRESTORE<F> * (params.up_scale == nullptr ? 1.0f : params.up_scale[2 * expert]);
    float const upScale = kRESTORE<F> * (params.up_scale == nullptr ? 1.0f : params.up_scale[2 * expert + 1]);
    for (int i = threadIdx.x; i < 8 * params.tokens * kTOP_K; i += PARTS * kWARP) {
        int const row = i % 8, pair = i / 8, token = pair / kTOP_K, unit = blockIdx.x * 8 + row;
        if (routes.expert[pair] == expert) {
            float const gate = partial.sum(PARTS, row, token) * gateScale;
            float const up = partial.sum(PARTS, row + 8, token) * upScale;
            work.act[int64_t{pair} * params.intermediate + unit / 16 * 16 + activationOrder(unit % 16)] =
                swigluRouted(gate, up);
        }
    }
}

template <WeightFormat F, int I, int S>
constexpr int kDOWN_WARPS = kTOP_K * Split<F, I>::kSPLIT + Split<F, S>::kSPLIT;

/// Grid (H / 16): six groups of warps take the distinct experts in turn, the last group the shared expert.
template <WeightFormat F, int E, int I, int S>
__global__ void __launch_bounds__(kDOWN_WARPS<F, I, S>* kWARP, 1)
    moeDownKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, I>::kSPLIT, SHARED_PARTS = Split<F, S>::kSPLIT;
    constexpr int WARPS = kDOWN_WARPS<F, I, S>, THREADS = WARPS * kWARP;
    __shared__ BlockRoutes routes;
    __shared__ __align__(16) float sums[PartialSums::floats(WARPS)];
    __shared__ float y[kPAIRS][kPANEL_ROWS];
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, column = lane / 4, panel = blockIdx.x;
    int const panels = params.hidden / kPANEL_ROWS;
    bool const isShared = warp >= kTOP_K * PARTS;
    int const group = warp / PARTS, part = isShared ? warp - kTOP_K * PARTS : warp % PARTS;

    static_assert(Split<F, I>::kTILES == Split<F, S>::kTILES);
    SliceOf<F, I> slice;
    if (isShared) {
        slice.template load<S>(params.shared_down + panel * panelBytes(F, S), part, lane);
    }
    // The logits are complete, though the up kernel is not: it let this one start after its own wait for the router.
    routes.fill<E>(work.logits, params.tokens, WARPS);
    if (!isShared && group < routes.count) {
        slice.template load<I>(params.down + (int64_t{routes.distinct[group]} * panels + panel) * panelBytes(F, I),
                               part, lane);
    }
    waitForPredecessor();
    allowSuccessor();

    PartialSums const mine{sums + PartialSums::floats(isShared ? kTOP_K * PARTS : group * PARTS)};
    if (isShared) {
        float acc[1][4] = {};
        bf16 const* const row = column < params.tokens ? work.shared_act + int64_t{column} * S : nullptr;
        slice.multiply(acc, part, OrderedX{row, lane});
        mine.store(acc[0], part, lane);
    }
    for (int first = 0; first < routes.count; first += kTOP_K) {
        int const index = first + group;
        bool const live = !isShared && index < routes.count;
        int const expert = live ? routes.distinct[index] : -1;
        if (live) {
            if (first > 0) {
                slice.template load<I>(params.down + (int64_t{expert} * panels + panel) * panelBytes(F, I), part, lane);
            }
            bf16 const* row = nullptr;
            for (int slot = 0; column < params.tokens && slot < kTOP_K; ++slot) {
                int const pair = column * kTOP_K + slot;
                if (routes.expert[pair] == expert) {
                    row = work.act + int64_t{pair} * I;
                }
            }
            float acc[1][4] = {};
            slice.multiply(acc, part, OrderedX{row, lane});
            mine.store(acc[0], part, lane);
        }
        __syncthreads();
        // y_e = r(acc_e * scale_e) of every pair whose expert is in this round.
        for (int i = threadIdx.x; i < params.tokens * kTOP_K * kPANEL_ROWS; i += THREADS) {
            int const pair = i / kPANEL_ROWS, row = i % kPANEL_ROWS;
            for (int g = 0; g < kTOP_K && first + g < routes.count; ++g) {
                if (routes.distinct[first + g] == routes.expert[pair]) {
                    PartialSums const theirs{sums + PartialSums::floats(g * PARTS)};
                    float const scale = params.down_scale == nullptr ? 1.0f : params.down_scale[routes.expert[pair]];
                    y[pair][row] = roundBf16(theirs.sum(PARTS, row, pair / kTOP_K) * (kRESTORE<F> * scale));
                }
            }
        }
        __syncthreads();
    }
    PartialSums const sharedSums{sums + PartialSums::floats(kTOP_K * PARTS)};
    float const sharedScale = kRESTORE<F> * (params.shared_down_scale == nullptr ? 1.0f : *params.shared_down_scale);
    for (int i = threadIdx.x; i < params.tokens * kPANEL_ROWS; i += THREADS) {
        int const token = i / kPANEL_ROWS, row = i % kPANEL_ROWS;
        float routed = 0;
#pragma unroll
        for (int slot = 0; slot < kTOP_K; ++slot) {
            routed += routes.weight[token * kTOP_K + slot] * y[token * kTOP_K + slot][row];
        }
        float const sharedOut = roundBf16(sharedSums.sum(SHARED_PARTS, row, token) * sharedScale);
        params.out[int64_t{token} * params.hidden + panel * kPANEL_ROWS + row] =
            __float2bfloat16_rn(roundBf16(routed) + sharedOut);
    }
}

template <WeightFormat F, typename R, int H, int E, int I, int S, int TOKENS>
cudaError_t launchInstance(MoeParams const& params, cudaStream_t stream) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    MoeDecodeWorkspace const work = MoeDecodeWorkspace::layout(params);
    auto const route = moeRouteKernel<F, R, H, TOKENS>;
    constexpr size_t BYTES = sizeof(RouteShared<F, H, TOKENS>);
    if (cudaError_t const error = allowShared(route, BYTES); error != cudaSuccess) {
        return error;
    }
    dim3 const routeGrid(2 * S / kPANEL_ROWS + (E + PARTS - 1) / PARTS);
    cudaError_t error = launchOverlapped(route, routeGrid, dim3(PARTS * kWARP), BYTES, stream, params, work);
    if (error != cudaSuccess) {
        return error;
    }
    int const most = params.tokens * kTOP_K < E ? params.tokens * kTOP_K : E;
    error = launchOverlapped(moeUpKernel<F, H, E>, dim3(2 * I / kPANEL_ROWS, most), dim3(PARTS * kWARP), 0, stream,
                             params, work);
    if (error != cudaSuccess) {
        return error;
    }
    return launchOverlapped(moeDownKernel<F, E, I, S>, dim3(H / kPANEL_ROWS), dim3(kDOWN_WARPS<F, I, S> * kWARP), 0,
                            stream, params, work);
}

template <WeightFormat F, typename R, int H, int E, int I, int S>
cudaError_t launchShape(MoeParams const& params, cudaStream_t stream) {
    return params.tokens == 1 ? launchInstance<F, R, H, E, I, S, 1>(params, stream)
                              : launchInstance<F, R, H, E, I, S, 8>(params, stream);
}

template <WeightFormat F, typename R>
cudaError_t launchTypes(MoeParams const& params, cudaStream_t stream) {
    auto const is = [&](int hidden, int experts, int intermediate, int shared) {
        return params.hidden == hidden && params.experts == experts && params.intermediate == intermediate &&
               params.shared == shared;
    };
    if (is(2048, 256, 512, 1024)) {
        return launchShape<F, R, 2048, 256, 512, 1024>(params, stream);
    }
    if (is(2048, 16, 512, 1024)) { // Flint's widths with few experts, for tests
        return launchShape<F, R, 2048, 16, 512, 1024>(params, stream);
    }
    if (is(128, 16, 64, 64)) { // flint-nano
        return launchShape<F, R, 128, 16, 64, 64>(params, stream);
    }
    return cudaErrorInvalidValue;
}

} // namespace

cudaError_t launchMoeDecode(MoeParams const& params, cudaStream_t stream) {
    if (params.format == WeightFormat::kNVFP4) {
        return params.router_f32 ? launchTypes<WeightFormat::kNVFP4, float>(params, stream)
                                 : launchTypes<WeightFormat::kNVFP4, bf16>(params, stream);
    }
    return params.router_f32 ? launchTypes<WeightFormat::kBF16, float>(params, stream)
                             : launchTypes<WeightFormat::kBF16, bf16>(params, stream);
}

} // namespace flint
