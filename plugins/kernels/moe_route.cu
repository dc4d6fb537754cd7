// First kernels of NormMoe's low-latency path: norm and router logits; of up to kSINGLE_TOKENS tokens also the shared
// expert's gate, up and SwiGLU. The choice of experts is made from the logits in every block of the next kernel, which
// is cheaper than one more kernel (see moe_decode.cu).
#include "kernels/launch.h"
#include "kernels/moe_internal.h"
#include "kernels/norm_rows.h"
#include "kernels/router_operands.cuh"
#include "kernels/swiglu.cuh"

#include <type_traits>

namespace flint {

namespace {

/// Router rows of a block of moeRouteSingleKernel.
constexpr int kROUTER_ROWS = 2;

/// Tiles that moeRouteSingleKernel has ready: fewer than all, for the router rows need registers, too.
template <WeightFormat F, typename R, int H>
constexpr int kROUTE_READY =
    F == WeightFormat::kNVFP4 && Split<F, H>::kTILES == 8 ? (sizeof(R) == 4 ? 5 : 7) : Split<F, H>::kTILES;

/// The share of one of WARPS warps of a block's router rows, in registers, in the order of the activations: of every
/// 256 columns a lane holds those of one 16-byte vector of SharedX, that is c .. c + 3 and c + 8 .. c + 11. Several
/// warps divide a row, or one takes several.
template <typename R, int H, int WARPS>
struct RouterShare {
    static constexpr int kVECTORS = H / 8; ///< of a row of activations
    static constexpr int kALL_CHUNKS = (kVECTORS + kWARP - 1) / kWARP;
    static constexpr int kROW_WARPS = WARPS > kROUTER_ROWS ? WARPS / kROUTER_ROWS : 1;
    static constexpr int kROWS = kROUTER_ROWS * kROW_WARPS / WARPS; ///< of this warp
    static constexpr int kCHUNKS = kALL_CHUNKS / kROW_WARPS;
    static_assert(kROWS * WARPS == kROUTER_ROWS * kROW_WARPS && kCHUNKS * kROW_WARPS == kALL_CHUNKS);
    using Four = std::conditional_t<sizeof(R) == 4, uint4, uint2>; ///< four weights
    int warp, lane;
    Four data[kROWS][kCHUNKS][2];

    /// The first of this warp's rows among the block's.
    __device__ __forceinline__ int first() const { return warp / kROW_WARPS * kROWS; }

    /// Vector: [tile][half][t], as in SharedX.
    __device__ __forceinline__ int vector(int chunk) const {
        return (warp % kROW_WARPS * kCHUNKS + chunk) * kWARP + lane;
    }

    /// `rows`: the first of the block's.
    __device__ __forceinline__ void load(R const* rows) {
#pragma unroll
        for (int row = 0; row < kROWS; ++row) {
            R const* const source = rows + (first() + row) * H + lane / 8 * kTILE_COLUMNS + lane % 4 * 16 +
                                    lane % 8 / 4 * 4 + warp % kROW_WARPS * kCHUNKS * (kWARP * 8);
#pragma unroll
            for (int chunk = 0; chunk < kCHUNKS; ++chunk) {
                if (vector(chunk) < kVECTORS) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        R const* const four = source + chunk * (kWARP * 8) + 8 * i;
                        if constexpr (sizeof(R) == 4) {
                            data[row][chunk][i] = loadStreaming(four);
                        } else {
                            loadStreaming8(four, data[row][chunk][i].x, data[row][chunk][i].y);
                        }
                    }
                }
            }
        }
    }

    /// Column c + i of the near four, c + 8 + i of the far.
    __device__ __forceinline__ float weight(int row, int chunk, int far, int i) const {
        auto const* const words = reinterpret_cast<uint32_t const*>(&data[row][chunk][far]);
        if constexpr (sizeof(R) == 4) {
            return __uint_as_float(words[i]);
        } else {
            float2 const pair = unpackBf16(words[i / 2]);
            return i % 2 == 0 ? pair.x : pair.y;
        }
    }

    /// Part of the dot products with a normalised row in SharedX<1>'s order, to `sums` [kROUTER_ROWS][kROW_WARPS].
    __device__ __forceinline__ void multiply(uint4 const* x, float* sums) const {
#pragma unroll
        for (int row = 0; row < kROWS; ++row) {
            float sum = 0;
#pragma unroll
            for (int chunk = 0; chunk < kCHUNKS; ++chunk) {
                if (vector(chunk) < kVECTORS) {
                    uint4 const activations = x[vector(chunk)];
                    // Pairs (c, c + 2), (c + 8, c + 10), (c + 1, c + 3), (c + 9, c + 11): see activationOrder.
                    uint32_t const words[4] = {activations.x, activations.y, activations.z, activations.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float2 const pair = unpackBf16(words[i]);
                        sum +=
                            pair.x * weight(row, chunk, i % 2, i / 2) + pair.y * weight(row, chunk, i % 2, i / 2 + 2);
                    }
                }
            }
            sum = warpSum(sum);
            if (lane == 0) {
                sums[(first() + row) * kROW_WARPS + warp % kROW_WARPS] = sum;
            }
        }
    }
};

template <WeightFormat F, typename R, int H>
struct RouteShared {
    static constexpr int kPARTS = Split<F, H>::kSPLIT;
    alignas(16) uint32_t x[SharedX<1>::bytes(H) / 4];
    float partial[PartialSums::floats(kPARTS)];
    NormScratch<H, kPARTS * kWARP> norm;
    float router[kROUTER_ROWS][RouterShare<R, H, kPARTS>::kROW_WARPS];
};

/// A token at a time. Grid (2 S / 16, T): each block takes a panel of the shared expert and kROUTER_ROWS router rows,
/// if there are so many, so that on an H200 all blocks are resident together, and of one token beside those of the
/// kernel before. The token is normalised here, and its row kept in work.x.
template <WeightFormat F, typename R, int H>
__global__ void __launch_bounds__(Split<F, H>::kSPLIT* kWARP, kREADY_BLOCKS<F>)
    moeRouteSingleKernel(MoeParams const params, MoeDecodeWorkspace const all) {
    int const token = blockIdx.y;
    MoeDecodeWorkspace const work = all.of(token, params);
    constexpr int PARTS = Split<F, H>::kSPLIT, THREADS = PARTS * kWARP;
    __shared__ RouteShared<F, R, H> shared;
    uint4 const* const x = reinterpret_cast<uint4 const*>(shared.x);
    int const lane = threadIdx.x % kWARP, part = threadIdx.x / kWARP, panel = blockIdx.x;
    int const expert = blockIdx.x * kROUTER_ROWS; // a multiple of it
    bool const routes = expert < params.experts;
    SliceOf<F, H> slice;
    slice.template load<H>(params.shared_up + panel * panelBytes(F, H), part, lane);
    RouterShare<R, H, PARTS> rows{part, lane};
    if (routes) {
        rows.load(static_cast<R const*>(params.router) + int64_t{expert} * H);
    }
    GateUpScales const scales(params.shared_up_scale, kRESTORE<F>);
    shared.norm.prefetch(params.norm);
    ReadySlice<F, Split<F, H>::kTILES, kROUTE_READY<F, R, H>> const ready(slice);
    ready.hold(params.tokens < 0, work.logits);
    waitForPredecessor();
    allowSuccessor(); // not before: the up kernel has nothing to load yet, and would take others' room

    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, 1};
    bool const keeps = blockIdx.x == 0;
    normalizeRows<H, 1, THREADS>(
        norm, shared.norm, keeps, shared.x, [&](int) { return token; },
        [&](int, int column, uint4 pairs) {
            if (keeps) {
                auto* const target = reinterpret_cast<uint32_t*>(work.x + column / 16 * 16) + column % 16 / 8;
                target[0] = pairs.x; // pairs at places 0, 4, 8, 12 of the 16, or 2, 6, 10, 14
                target[2] = pairs.y;
                target[4] = pairs.z;
                target[6] = pairs.w;
            }
        });
    if (routes) {
        rows.multiply(x, shared.router[0]);
    }
    float acc[1][4];
    ready.multiply(acc, part, SharedX<1>{x, lane});
    PartialSums const partial{shared.partial};
    partial.store(acc[0], part, lane);
    __syncthreads();
    if (threadIdx.x < 8) {
        int const row = threadIdx.x, unit = panel * 8 + row;
        float const gate = partial.sum(PARTS, row, 0) * scales.gate, up = partial.sum(PARTS, row + 8, 0) * scales.up;
        work.shared_act[unit / 16 * 16 + activationOrder(unit % 16)] = swigluRounded(gate, up);
    } else if (int const row = threadIdx.x - (THREADS - kROUTER_ROWS); row >= 0 && routes) {
        float logit = 0;
        for (float const sum : shared.router[row]) {
            logit += sum;
        }
        work.logits[expert + row] = logit;
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
    if (params.tokens <= kSINGLE_TOKENS) {
        int const panels = 2 * params.shared / kPANEL_ROWS;
        if (params.experts % kROUTER_ROWS != 0 || params.experts > panels * kROUTER_ROWS) {
            return cudaErrorInvalidValue;
        }
        return launchSpread(kSPREADS<F, 1>, moeRouteSingleKernel<F, R, H>, dim3(panels, params.tokens),
                            dim3(Split<F, H>::kSPLIT * kWARP), 0, stream, params, work);
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
