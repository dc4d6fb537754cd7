// First kernels of NormMoe's low-latency path: norm and router logits; for one token also the shared expert's gate, up
// and SwiGLU. The choice of experts is made from the logits in every block of the next kernel, which is cheaper than
// one more kernel (see moe_decode.cu).
#include "kernels/launch.h"
#include "kernels/moe_internal.h"
#include "kernels/norm_rows.h"
#include "kernels/router_operands.cuh"
#include "kernels/swiglu.cuh"

#include <type_traits>

namespace flint {

namespace {

template <WeightFormat F, int H>
struct RouteShared {
    alignas(16) uint32_t x[SharedX<1>::bytes(H) / 4];
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

    /// Dot product with a normalised row in SharedX<1>'s order; every lane gets it.
    __device__ __forceinline__ float dot(uint4 const* x, int lane) const {
        float sum = 0;
#pragma unroll
        for (int chunk = 0; chunk < kCHUNKS; ++chunk) {
            int const v = vector(chunk, lane);
            if (v < kVECTORS) {
                uint4 const activations = x[v];
                // Pairs (c, c + 2), (c + 8, c + 10), (c + 1, c + 3), (c + 9, c + 11): see activationOrder.
                uint32_t const words[4] = {activations.x, activations.y, activations.z, activations.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float2 const pair = unpackBf16(words[i]);
                    sum += pair.x * weight(chunk, i % 2, i / 2) + pair.y * weight(chunk, i % 2, i / 2 + 2);
                }
            }
        }
        return warpSum(sum);
    }
};

/// One token. Grid (2 S / 16 + ceil(E / kSPLIT)): first the shared expert's panels, then one router row per warp. The
/// token is normalised here, and its row kept in work.x.
template <WeightFormat F, typename R, int H>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP, kREADY_BLOCKS<F>)
    moeRouteSingleKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int PARTS = Split<F, H>::kSPLIT;
    constexpr int THREADS = PARTS * kWARP;
    __shared__ RouteShared<F, H> shared;
    uint4 const* const x = reinterpret_cast<uint4 const*>(shared.x);
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP;
    int const panels = 2 * params.shared / kPANEL_ROWS, panel = blockIdx.x;
    allowSuccessor();
    auto const normalize = [&] {
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
    };
    if (panel >= panels) {
        int const expert = (panel - panels) * PARTS + part;
        RouterRow<R, H> row;
        if (expert < params.experts) {
            row.load(static_cast<R const*>(params.router) + int64_t{expert} * H, lane);
        }
        normalize();
        if (expert < params.experts) {
            float const logit = row.dot(x, lane);
            if (lane == 0) {
                work.logits[expert] = logit;
            }
        }
        return;
    }
    SliceOf<F, H> slice;
    slice.template load<H>(params.shared_up + panel * panelBytes(F, H), part, lane);
    GateUpScales const scales(params.shared_up_scale, kRESTORE<F>);
    ReadySlice const ready(slice);
    ready.hold(params.tokens < 0, work.logits);
    normalize();
    float acc[1][4];
    ready.multiply(acc, part, SharedX<1>{x, lane});
    PartialSums const partial{shared.partial};
    partial.store(acc[0], part, lane);
    __syncthreads();
    if (threadIdx.x < 8) {
        int const row = threadIdx.x, unit = panel * 8 + row;
        float const gate = partial.sum(PARTS, row, 0) * scales.gate, up = partial.sum(PARTS, row + 8, 0) * scales.up;
        work.shared_act[unit / 16 * 16 + activationOrder(unit % 16)] = swigluRounded(gate, up);
    }
}

/// How the warps of a block of the kernel below divide a router row.
template <int H>
struct RouterSplit {
    static constexpr int kALL_TILES = H / kTILE_COLUMNS;
    static constexpr int kTILES = kALL_TILES > 16 ? kALL_TILES / 16 : 1;
    static constexpr int kWARPS = kALL_TILES / kTILES;
    static_assert(kTILES * kWARPS == kALL_TILES);
};

/// Several tokens, whose normalised rows are work.x. Grid (E / 16): the logits of 16 experts. Weights become operands
/// before the wait; activations go from the L2 to the operands they are.
template <typename R, int H>
__global__ void __launch_bounds__(RouterSplit<H>::kWARPS* kWARP, 1)
    moeRouteKernel(MoeParams const params, MoeDecodeWorkspace const work) {
    constexpr int TILES = RouterSplit<H>::kTILES, WARPS = RouterSplit<H>::kWARPS, WEIGHT_PARTS = kROUTER_PARTS<R>;
    __shared__ __align__(16) float sums[PartialSums::floats(WARPS)];
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, g = lane / 4, t = lane % 4;
    int const first = blockIdx.x * kPANEL_ROWS, column = warp * TILES * kTILE_COLUMNS + t * 16;
    allowSuccessor();
    R const* const row = static_cast<R const*>(params.router) + int64_t{first + g} * H + column;
    RouterTile<R> tiles[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        R const* const source = row + i * kTILE_COLUMNS;
        tiles[i].load(source, source + int64_t{8} * H, [](uint4 const* data) { return loadStreaming(data); });
    }
    uint32_t a[TILES][WEIGHT_PARTS][4][4];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        tiles[i].operands(a[i]);
    }
    if (params.tokens < 0) { // never: keeps the work here, see ReadySlice::hold
        auto* const words = reinterpret_cast<uint32_t volatile*>(work.logits);
#pragma unroll
        for (int i = 0; i < TILES * WEIGHT_PARTS * 16; ++i) {
            words[i * kWARP] = a[i / (WEIGHT_PARTS * 16)][i / 16 % WEIGHT_PARTS][i / 4 % 4][i % 4];
        }
    }
    waitForPredecessor();

    uint4 x[TILES][2]; // halves of a tile, for token g
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        bf16 const* const source = work.x + int64_t{g} * H + column + i * kTILE_COLUMNS;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            x[i][half] = g < params.tokens ? loadNow16(source + half * 8) : make_uint4(0, 0, 0, 0);
        }
    }
    float acc[WEIGHT_PARTS][4] = {};
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int part = 0; part < WEIGHT_PARTS; ++part) {
                mma16816(acc[part], a[i][part][2 * half], x[i][half].x, x[i][half].y);
                mma16816(acc[part], a[i][part][2 * half + 1], x[i][half].z, x[i][half].w);
            }
        }
    }
#pragma unroll
    for (int part = WEIGHT_PARTS - 1; part > 0; --part) { // small parts first
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            acc[part - 1][i] += acc[part][i];
        }
    }
    PartialSums const partial{sums};
    partial.store(acc[0], warp, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < kPANEL_ROWS * params.tokens; i += WARPS * kWARP) {
        int const expert = i % kPANEL_ROWS, token = i / kPANEL_ROWS;
        work.logits[token * params.experts + first + expert] = partial.sum(WARPS, expert, token);
    }
}

template <WeightFormat F, typename R, int H>
cudaError_t launchInstance(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    if (params.tokens == 1) {
        constexpr int PARTS = Split<F, H>::kSPLIT;
        dim3 const grid(2 * params.shared / kPANEL_ROWS + (params.experts + PARTS - 1) / PARTS);
        return launchOverlapped(moeRouteSingleKernel<F, R, H>, grid, dim3(PARTS * kWARP), 0, stream, params, work);
    }
    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    if (cudaError_t const error = launchNormRows(norm, H, RowOrder::kDECODE, work.x, stream); error != cudaSuccess) {
        return error;
    }
    dim3 const grid(params.experts / kPANEL_ROWS), block(RouterSplit<H>::kWARPS * kWARP);
    return launchOverlapped(moeRouteKernel<R, H>, grid, block, 0, stream, params, work);
}

template <WeightFormat F, typename R>
cudaError_t launchTypes(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream) {
    switch (params.hidden) {
    case 2048:
        return launchInstance<F, R, 2048>(params, work, stream);
    case 128:
        return launchInstance<F, R, 128>(params, work, stream);
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
