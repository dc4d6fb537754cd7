// First kernels of NormMoe's low-latency path: norm and router logits; for one token also the shared expert's gate, up
// and SwiGLU. The choice of experts is made from the logits in every block of the next kernel, which is cheaper than
// one more kernel (see moe_decode.cu).
#include "kernels/launch.h"
#include "kernels/moe_internal.h"
#include "kernels/norm_rows.h"
#include "kernels/swiglu.cuh"

#include <type_traits>

namespace flint {

namespace {

template <WeightFormat F, int H, int TOKENS>
struct RouteShared {
    alignas(16) uint32_t x[SharedX<TOKENS>::bytes(H) / 4];
    float partial[PartialSums::floats(Split<F, H>::kSPLIT)];
    float sums[Split<F, H>::kSPLIT];
};

/// A router row in registers, in the order of the activations: of every 256 columns a lane holds those of one 16-byte
/// vector of SharedX, that is c .. c + 3 and c + 8 .. c + 11.
template <typename R, int H>
struct RouterRow {
    static constexpr int kVECTORS = H / 8; ///< of a row of activations
    static constexpr int kCHUNKS = (kVECTORS + kWARP - 1) / kWARP;
    using Four = std::conditional_t<sizeof(R) == 4, uint4, uint2>; ///< four weights
    Four data[kCHUNKS][2];

    /// Vector: [tile][half][t], as in SharedX.
    static __device__ __forceinline__ int vector(int chunk, int lane) { return chunk * kWARP + lane; }

    __device__ __forceinline__ void load(R const* row, int lane) {
#pragma unroll
        for (int chunk = 0; chunk < kCHUNKS; ++chunk) {
            int const v = vector(chunk, lane);
            if (v < kVECTORS) {
                R const* const source = row + v / 8 * kTILE_COLUMNS + v % 4 * 16 + v % 8 / 4 * 4;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if constexpr (sizeof(R) == 4) {
                        data[chunk][i] = loadStreaming(source + 8 * i);
                    } else {
                        loadStreaming8(source + 8 * i, data[chunk][i].x, data[chunk][i].y);
                    }
                }
            }
        }
    }

    /// Column c + i of the near four, c + 8 + i of the far.
    __device__ __forceinline__ float weight(int chunk, int far, int i) const {
        auto const* const words = reinterpret_cast<uint32_t const*>(&data[chunk][far]);
        if constexpr (sizeof(R) == 4) {
            return __uint_as_float(words[i]);
        } else {
            float2 const pair = unpackBf16(words[i / 2]);
            return i % 2 == 0 ? pair.x : pair.y;
        }
    }

    /// A lane's part of the dot product with a token's normalised row.
    template <int TOKENS>
    __device__ __forceinline__ float dot(uint4 const* x, int token, int lane) const {
        float sum = 0;
#pragma unroll
        for (int chunk = 0; chunk < kCHUNKS; ++chunk) {
            int const v = vector(chunk, lane);
            if (v < kVECTORS) {
                uint4 const activations = x[(v / 4 * TOKENS + token) * 4 + v % 4];
                // Pairs (c, c + 2), (c + 8, c + 10), (c + 1, c + 3), (c + 9, c + 11): see activationOrder.
                uint32_t const words[4] = {activations.x, activations.y, activations.z, activations.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float2 const pair = unpackBf16(words[i]);
                    sum += pair.x * weight(chunk, i % 2, i / 2) + pair.y * weight(chunk, i % 2, i / 2 + 2);
                }
            }
        }
        return sum;
    }
};

constexpr int kROUTER_TOKENS = 4; ///< of a block, where a step has several

/// Grid (shared panels + ceil(E / kSPLIT), ceil(T / TOKENS)): first the shared expert's 2 S / 16 panels if TOKENS is 1,
/// then one router row per warp. One token is normalised here (and its row kept in work.x); of several work.x holds the
/// normalised rows.
template <WeightFormat F, typename R, int H, int TOKENS>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP, kREADY_BLOCKS<F>)
    moeRouteKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    constexpr int THREADS = PARTS * kWARP;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& shared = *reinterpret_cast<RouteShared<F, H, TOKENS>*>(raw);
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;
    int const panels = TOKENS == 1 ? 2 * params.shared / kPANEL_ROWS : 0, panel = blockIdx.x;
    int const first = blockIdx.y * TOKENS, tokens = params.tokens - first;
    allowSuccessor();
    auto const activations = [&] {
        if constexpr (TOKENS == 1) {
            NormWeights<H, THREADS> const weights(params.norm);
            waitForPredecessor();
            NormParams const norm{params.delta,        params.residual, params.norm,
                                  params.residual_out, params.eps,      params.tokens};
            bool const keeps = blockIdx.x == 0;
            normalizeRows<H, 1, THREADS>(
                norm, weights, keeps, shared.x, shared.sums, [](int token) { return token; },
                [&](int, int column, uint4 pairs) {
                    if (keeps) {
                        auto* const target = reinterpret_cast<uint32_t*>(work.x + column / 16 * 16) + column % 16 / 8;
                        target[0] = pairs.x; // pairs at places 0, 4, 8, 12 of the 16, or 2, 6, 10, 14
                        target[2] = pairs.y;
                        target[4] = pairs.z;
                        target[6] = pairs.w;
                    }
                });
        } else {
            waitForPredecessor();
            copyRowsAsync<H, TOKENS, THREADS>(work.x + int64_t{first} * H, tokens, shared.x);
            commitCopies();
            waitCopies<0>();
            __syncthreads();
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
            float logits[TOKENS]; // rows behind the last token are zeros
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                logits[i] = row.template dot<TOKENS>(reinterpret_cast<uint4 const*>(shared.x), i, lane);
            }
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                float const logit = warpSum(logits[i]);
                if (lane == 0 && i < tokens) {
                    work.logits[(first + i) * params.experts + expert] = logit;
                }
            }
        }
        return;
    }
    if constexpr (TOKENS == 1) {
        SliceOf<F, H> slice;
        slice.template load<H>(params.shared_up + panel * panelBytes(F, H), part, lane);
        GateUpScales const scales(params.shared_up_scale, kRESTORE<F>);
        ReadySlice const ready(slice);
        ready.hold(params.tokens < 0, work.logits);
        activations();
        float acc[1][4];
        ready.multiply(acc, part, SharedX<1>{reinterpret_cast<uint4 const*>(shared.x), lane});
        PartialSums const partial{shared.partial};
        partial.store(acc[0], part, lane);
        __syncthreads();
        if (threadIdx.x < 8) {
            int const row = threadIdx.x, unit = panel * 8 + row;
            float const gate = partial.sum(PARTS, row, 0) * scales.gate,
                        up = partial.sum(PARTS, row + 8, 0) * scales.up;
            work.shared_act[unit / 16 * 16 + activationOrder(unit % 16)] = swigluRounded(gate, up);
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
    static_assert(BYTES <= kCOMMON_SHARED_BYTES);
    if (cudaError_t const error = allowShared(kernel, BYTES); error != cudaSuccess) {
        return error;
    }
    int const panels = TOKENS == 1 ? 2 * params.shared / kPANEL_ROWS : 0;
    dim3 const grid(panels + (params.experts + PARTS - 1) / PARTS, (params.tokens + TOKENS - 1) / TOKENS);
    return launchOverlapped(kernel, grid, dim3(PARTS * kWARP), BYTES, stream, params, work);
}

template <WeightFormat F, typename R>
cudaError_t launchTypes(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    bool const single = params.tokens == 1;
    switch (params.hidden) {
    case 2048:
        return single ? launchInstance<F, R, 2048, 1>(params, work, stream)
                      : launchInstance<F, R, 2048, kROUTER_TOKENS>(params, work, stream);
    case 128:
        return single ? launchInstance<F, R, 128, 1>(params, work, stream)
                      : launchInstance<F, R, 128, kROUTER_TOKENS>(params, work, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t launchMoeRoute(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    if (params.format == WeightFormat::kNVFP4) {
        return params.router_f32 ? launchTypes<WeightFormat::kNVFP4, float>(params, work, stream)
                                 : launchTypes<WeightFormat::kNVFP4, bf16>(params, work, stream);
    }
    return params.router_f32 ? launchTypes<WeightFormat::kBF16, float>(params, work, stream)
                             : launchTypes<WeightFormat::kBF16, bf16>(params, work, stream);
}

} // namespace flint
