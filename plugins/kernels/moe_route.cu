// First kernels of NormMoe's low-latency path: norm; router logits; the shared expert's gate, up and SwiGLU; and for
// several tokens the choice of experts. (For one token that is cheap enough for every later block to do again.)
#include "kernels/launch.h"
#include "kernels/moe_internal.h"
#include "kernels/norm_rows.h"
#include "kernels/routing.cuh"
#include "kernels/swiglu.cuh"

namespace flint {

namespace {

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

/// Normalised, ordered rows [T, H] from global to shared memory, as normalizeRows leaves them. Ends with a barrier.
template <int H, int TOKENS, int THREADS>
__device__ __forceinline__ void copyRows(bf16 const* rows, int tokens, uint32_t* x) {
    constexpr int VECTORS = H / 8; // of a row
    auto* const target = reinterpret_cast<uint4*>(x);
#pragma unroll 8
    for (int i = threadIdx.x; i < VECTORS * TOKENS; i += THREADS) {
        int const token = i / VECTORS, vector = i % VECTORS;
        uint4 const data = token < tokens ? loadNow16(rows + int64_t{token} * H + vector * 8) : make_uint4(0, 0, 0, 0);
        // A vector is a half of a lane's 16 columns.
        int const tile = vector / 8, lane = vector % 8 / 2, half = vector % 2;
        target[((tile * 2 + half) * TOKENS + token) * 4 + lane] = data;
    }
    __syncthreads();
}

/// Grid (2 S / 16 + ceil(E / kSPLIT)): first the shared expert's panels, then one router row per warp. One token is
/// normalised here (and its row kept in work.x); of several work.x holds the normalised rows.
template <WeightFormat F, typename R, int H, int TOKENS>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP, kREADY_BLOCKS<F>)
    moeRouteKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    constexpr int THREADS = PARTS * kWARP;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<RouteShared<F, H, TOKENS>*>(raw);
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;
    int const panels = 2 * params.shared / kPANEL_ROWS, panel = blockIdx.x;
    allowSuccessor();
    auto const activations = [&] {
        if constexpr (TOKENS == 1) {
            NormWeights<H, THREADS> const weights(params.norm);
            waitForPredecessor();
            NormParams const norm{params.delta,        params.residual, params.norm,
                                  params.residual_out, params.eps,      params.tokens};
            bool const first = blockIdx.x == 0;
            normalizeRows<H, 1, THREADS>(
                norm, weights, first, shared.x, shared.sums, [](int token) { return token; },
                [&](int, int column, uint4 pairs) {
                    if (first) {
                        auto* const target = reinterpret_cast<uint32_t*>(work.x + column / 16 * 16) + column % 16 / 8;
                        target[0] = pairs.x; // pairs at places 0, 4, 8, 12 of the 16, or 2, 6, 10, 14
                        target[2] = pairs.y;
                        target[4] = pairs.z;
                        target[6] = pairs.w;
                    }
                });
        } else {
            waitForPredecessor();
            copyRows<H, TOKENS, THREADS>(work.x, params.tokens, shared.x);
        }
    };
    if (panel >= panels) {
        int const expert = (panel - panels) * PARTS + part;
        RouterRow<R, H> row;
        if (expert < params.experts) {
            row.load(static_cast<R const*>(params.router) + int64_t{expert} * H, lane);
        }
        activations();
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
    SliceOf<F, H> slice;
    slice.template load<H>(params.shared_up + panel * panelBytes(F, H), part, lane);
    ReadySlice const ready(slice);
    ready.hold(params.tokens < 0, work.logits);
    activations();
    float acc[1][4];
    ready.multiply(acc, part, SharedX<TOKENS>{reinterpret_cast<uint4 const*>(shared.x), lane});
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

/// One block, a warp per token: the choice of every token, and the list of experts that any of them chose.
template <int E>
__global__ void __launch_bounds__(kDECODE_TOKENS* kWARP)
    moeChooseKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    __shared__ int chosen[kDECODE_PAIRS];
    int const lane = threadIdx.x % kWARP, token = threadIdx.x / kWARP;
    waitForPredecessor();
    allowSuccessor();
    if (token < params.tokens) {
        Routes const routes = routeToken<E>(work.logits + token * E, lane);
#pragma unroll
        for (int slot = 0; slot < kTOP_K; ++slot) {
            if (lane == slot) {
                chosen[token * kTOP_K + slot] = routes.expert[slot];
                work.routes->expert[token * kTOP_K + slot] = routes.expert[slot];
                work.routes->weight[token * kTOP_K + slot] = routes.weight[slot];
            }
        }
    }
    __syncthreads();
    if (token == 0) {
        int before = 0;
        for (int first = 0; first < params.tokens * kTOP_K; first += kWARP) {
            int const pair = first + lane;
            bool isNew = pair < params.tokens * kTOP_K;
            int const mine = isNew ? chosen[pair] : -1;
            for (int other = 0; other < pair && other < params.tokens * kTOP_K; ++other) {
                isNew = isNew && chosen[other] != mine;
            }
            unsigned const news = __ballot_sync(0xFFFFFFFFu, isNew);
            if (isNew) {
                work.routes->distinct[before + __popc(news & ((1u << lane) - 1))] = mine;
            }
            before += __popc(news);
        }
        if (lane == 0) {
            work.routes->count = before;
        }
    }
}

template <WeightFormat F, typename R, int H, int TOKENS>
cudaError_t launchInstance(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    if (TOKENS > 1) {
        NormParams const norm{params.delta,        params.residual, params.norm,
                              params.residual_out, params.eps,      params.tokens};
        cudaError_t const error = launchNormRows(norm, H, RowOrder::kDECODE, work.x, stream);
        if (error != cudaSuccess) {
            return error;
        }
    }
    auto const kernel = moeRouteKernel<F, R, H, TOKENS>;
    constexpr size_t BYTES = sizeof(RouteShared<F, H, TOKENS>);
    if (cudaError_t const error = allowShared(kernel, BYTES); error != cudaSuccess) {
        return error;
    }
    dim3 const grid(2 * params.shared / kPANEL_ROWS + (params.experts + PARTS - 1) / PARTS);
    cudaError_t const error = launchOverlapped(kernel, grid, dim3(PARTS * kWARP), BYTES, stream, params, work);
    if (error != cudaSuccess || TOKENS == 1) {
        return error;
    }
    auto const choose = params.experts == 256 ? moeChooseKernel<256> : moeChooseKernel<16>;
    return launchOverlapped(choose, dim3(1), dim3(kDECODE_TOKENS * kWARP), 0, stream, params, work);
}

template <WeightFormat F, typename R>
cudaError_t launchTypes(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    bool const single = params.tokens == 1;
    switch (params.hidden) {
    case 2048:
        return single ? launchInstance<F, R, 2048, 1>(params, work, stream)
                      : launchInstance<F, R, 2048, 8>(params, work, stream);
    case 128:
        return single ? launchInstance<F, R, 128, 1>(params, work, stream)
                      : launchInstance<F, R, 128, 8>(params, work, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t launchMoeRoute(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    if (params.experts != 256 && params.experts != 16) {
        return cudaErrorInvalidValue;
    }
    if (params.format == WeightFormat::kNVFP4) {
        return params.router_f32 ? launchTypes<WeightFormat::kNVFP4, float>(params, work, stream)
                                 : launchTypes<WeightFormat::kNVFP4, bf16>(params, work, stream);
    }
    return params.router_f32 ? launchTypes<WeightFormat::kBF16, float>(params, work, stream)
                             : launchTypes<WeightFormat::kBF16, bf16>(params, work, stream);
}

} // namespace flint
