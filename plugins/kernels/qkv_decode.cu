// NormQkvRope for up to eight tokens: a cluster of blocks makes a head, from the projection to what attention reads.
//
// A head is eight panels. Its blocks tell each other the squares of their rows, and where RoPE's partners, four panels
// apart, stand in two blocks, the rows themselves: words sent from shared memory to shared memory and counted by the
// receiver's CopyBarrier. Each block waits for all that it is sent, so none ends while another one writes to it; and
// none writes before waitForCluster, which is passed while the previous kernel still runs.
#include "kernels/launch.h"
#include "kernels/norm.cuh"
#include "kernels/qkv_head.cuh"
#include "kernels/qkv_internal.h"

#include <type_traits>

namespace flint {

namespace {

constexpr int kHEAD_PANELS = kHEAD_DIM / kPANEL_ROWS;
constexpr int kPANEL_PAIRS = kPANEL_ROWS / 2; ///< of neighbouring rows: one thread finishes a pair

/// Panels of an NVFP4 block, 1 or 2: with two, p and p + 4, RoPE's partners are at hand, and half as many blocks read
/// the activations. In BF16 a panel has twice as many warps, and two have too many.
constexpr int kNVFP4_PANELS = 2;

/// Tiles that a warp has ready before the wait, of eight: as many as leave a multiprocessor registers for two blocks of
/// two panels, or three of one, so that all of the projection's are resident together on an H200.
constexpr int kREADY_TILES = kNVFP4_PANELS == 2 ? 5 : 7;

/// Padded: a warp reads every second row of four tokens, in 32 different banks.
using Sums = PaddedSums<kDECODE_TOKENS + 2>;

/// How the kernel's instance for a format, H, and one or up to eight tokens divides the work.
template <WeightFormat F, int H, int TOKENS>
struct Shape {
    static constexpr int kPARTS = Split<F, H>::kSPLIT; ///< warps of a panel
    static constexpr int kPANELS = kPARTS == 1 ? 2 : F == WeightFormat::kNVFP4 ? kNVFP4_PANELS : 1; ///< of a block
    static constexpr int kRANKS = kHEAD_PANELS / kPANELS;                                           ///< of a cluster
    static constexpr int kTHREADS = kPANELS * kPARTS * kWARP;
    static constexpr int kTILES = Split<F, H>::kTILES;
    static constexpr int kREADY = kTILES == 8 ? kREADY_TILES : kTILES;
    static constexpr int kRESIDENT = kPANELS == 2 ? 2 : kREADY_BLOCKS<F>; ///< blocks a multiprocessor
    static_assert(kTHREADS >= TOKENS * kPANEL_PAIRS);
};

template <WeightFormat F, int H, int TOKENS>
struct DecodeShared {
    using S = Shape<F, H, TOKENS>;
    alignas(16) uint8_t x[TOKENS == 1 ? SharedX<1>::bytes(H) : TOKENS * RowX<H>::kSTRIDE];
    alignas(16) float partial[S::kPANELS][Sums::floats(S::kPARTS)];
    alignas(16) float squares[TOKENS][S::kRANKS]; ///< received, of each block
    uint32_t partners[TOKENS * kPANEL_PAIRS];     ///< received, with one panel a block: the pairs 64 rows away
    std::conditional_t<TOKENS == 1, NormScratch<H, S::kTHREADS>, uint8_t> norm;
    CopyBarrier rows, words;
    HeadQuad quads[TOKENS * kPANEL_PAIRS]; ///< of each finishing thread, not in registers: these are the weights'
};

/// Grid (heads * kRANKS), clusters of kRANKS: each has a head, each block panels rank, rank + kRANKS .. of it. One
/// token is normalised here; of several `x` [T, H] are the normalised rows, ordered.
template <WeightFormat F, int H, int TOKENS>
__global__ void __launch_bounds__(Shape<F, H, TOKENS>::kTHREADS, Shape<F, H, TOKENS>::kRESIDENT)
    qkvDecodeKernel(QkvParams const params, bf16 const* x) {
    using S = Shape<F, H, TOKENS>;
    constexpr int PARTS = S::kPARTS, PANELS = S::kPANELS, RANKS = S::kRANKS, THREADS = S::kTHREADS;
    __shared__ DecodeShared<F, H, TOKENS> shared;
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, part = warp % PARTS, panel = warp / PARTS;
    int const head = blockIdx.x / RANKS, rank = blockIdx.x % RANKS;
    bool const isV = head >= params.heads + params.kv_heads;
    // Of a finishing thread: dimensions low, low + 1 of a token's head, and their partners.
    int const token = threadIdx.x / kPANEL_PAIRS, pair = threadIdx.x % kPANEL_PAIRS;
    int const low = rank % (kHEAD_PANELS / 2) * kPANEL_ROWS + 2 * pair;
    bool const live = token < params.tokens;

    if (threadIdx.x == 0) {
        shared.rows.open();
        shared.words.open();
    }
    arriveAtCluster();
    SliceOf<F, H> slice;
    int const row = head * kHEAD_PANELS + rank + panel * RANKS;
    slice.template load<H>(params.weight + row * panelBytes(F, H), part, lane);
    allowSuccessor();
    float scale = kRESTORE<F>;
    if (params.scale != nullptr) {
        scale *= __uint_as_float(loadNow4(params.scale + (head >= params.heads) + isV));
    }
    if (live) {
        shared.quads[threadIdx.x] = HeadQuad::load(params, token, head, low);
    }
    ReadySlice<F, S::kTILES, S::kREADY> const ready(slice);
    ready.hold(params.tokens < 0, params.q);
    float acc[1][4];
    if constexpr (TOKENS == 1) {
        shared.norm.prefetch(params.norm);
        waitForCluster();
        waitForPredecessor();
        NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, 1};
        auto* const ordered = reinterpret_cast<uint32_t*>(shared.x);
        normalizeToken<H, THREADS>(norm, shared.norm, blockIdx.x == 0, ordered);
        ready.multiply(acc, part, SharedX<1>{reinterpret_cast<uint4 const*>(ordered), lane});
    } else {
        waitForCluster();
        waitForPredecessor();
        if (threadIdx.x == 0) {
            shared.rows.expect(params.tokens * H * 2);
            RowX<H>::copy(shared.rows, x, params.tokens, shared.x);
        }
        __syncwarp();
        shared.rows.wait();
        bool const present = lane / 4 < params.tokens;
        ready.multiply(acc, part, RowX<H>{present ? shared.x + lane / 4 * RowX<H>::kSTRIDE : nullptr, lane});
    }
    Sums{shared.partial[panel]}.store(acc[0], part, lane);
    __syncthreads();
    if (warp * (kWARP / kPANEL_PAIRS) >= params.tokens) {
        return;
    }

    HeadQuad const quad = live ? shared.quads[threadIdx.x] : HeadQuad{};
    uint32_t own[PANELS];
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
        Sums const partial{shared.partial[i]};
        own[i] = packBf16(partial.sum(PARTS, 2 * pair, token) * scale, partial.sum(PARTS, 2 * pair + 1, token) * scale);
    }
    bool const isHigh = PANELS == 1 && rank >= RANKS / 2; // own[0] is the upper half's
    uint32_t words[2] = {own[0], own[PANELS - 1]};
    if (!isV) {
        float squares = pairSquares(own[0]);
        if constexpr (PANELS == 2) {
            squares += pairSquares(own[1]);
        }
        squares = warpSum<kPANEL_PAIRS>(squares);
        if (live && pair < RANKS) {
            shared.words.send(pair, __float_as_uint(squares), &shared.squares[token][rank]);
        }
        if (PANELS == 1 && live) {
            shared.words.send(rank ^ (RANKS / 2), own[0], &shared.partners[threadIdx.x]);
        }
        if (threadIdx.x == 0) {
            shared.words.expect(params.tokens * (RANKS + (PANELS == 1 ? kPANEL_PAIRS : 0)) * 4);
        }
        __syncwarp();
        shared.words.waitForWords();
        squares = 0;
#pragma unroll
        for (int i = 0; i < RANKS; ++i) {
            squares += shared.squares[live ? token : 0][i];
        }
        if constexpr (PANELS == 1) {
            uint32_t const partner = live ? shared.partners[threadIdx.x] : 0;
            words[0] = isHigh ? partner : own[0];
            words[1] = isHigh ? own[0] : partner;
        }
        quad.finish(params, squares, words);
    }
    if (quad.target != nullptr) {
        if (PANELS == 2 || !isHigh) {
            *reinterpret_cast<uint32_t*>(quad.target + low) = words[0];
        }
        if (PANELS == 2 || isHigh) {
            *reinterpret_cast<uint32_t*>(quad.target + low + kHEAD_DIM / 2) = words[1];
        }
    }
}

template <WeightFormat F, int H, int TOKENS>
cudaError_t launchTokens(QkvParams const& params, bf16 const* x, cudaStream_t stream) {
    using S = Shape<F, H, TOKENS>;
    dim3 const grid((params.heads + 2 * params.kv_heads) * S::kRANKS);
    return launchCluster(qkvDecodeKernel<F, H, TOKENS>, grid, dim3(S::kTHREADS), S::kRANKS, 0, stream, params, x);
}

template <WeightFormat F>
cudaError_t launchFormat(QkvParams const& params, bf16 const* x, cudaStream_t stream) {
    switch (params.hidden) {
    case 2048:
        return params.tokens == 1 ? launchTokens<F, 2048, 1>(params, x, stream)
                                  : launchTokens<F, 2048, kDECODE_TOKENS>(params, x, stream);
    case 128:
        return params.tokens == 1 ? launchTokens<F, 128, 1>(params, x, stream)
                                  : launchTokens<F, 128, kDECODE_TOKENS>(params, x, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t launchQkvDecode(QkvParams const& params, bf16 const* x, cudaStream_t stream) {
    return params.format == WeightFormat::kNVFP4 ? launchFormat<WeightFormat::kNVFP4>(params, x, stream)
                                                 : launchFormat<WeightFormat::kBF16>(params, x, stream);
}

} // namespace flint
