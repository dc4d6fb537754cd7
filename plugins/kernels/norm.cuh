// Residual add and RMSNorm as a block's prologue: s = delta + residual in FP32, residual_out = r(s),
// x = r(s * rsqrt(mean(s^2) + eps) * w) from the unrounded s.
#pragma once

#include "kernels/slice.cuh"

namespace flint {

struct NormParams {
    bf16 const* delta;    ///< [T, H] bf16
    bf16 const* residual; ///< [T, H] bf16; nullptr: none, s = delta
    float const* weight;  ///< [H] f32
    bf16* residual_out;   ///< [T, H] bf16; nullptr: not written
    float eps;
    int tokens; ///< T
};

constexpr int kNORM_COLUMNS = 8; ///< columns of a thread: 16 bytes

/// What becomes a NormSegment, on its way: all loads of a thread are under way together.
struct NormInputs {
    uint4 delta, residual;

    __device__ __forceinline__ void load(NormParams const& params, int64_t offset) {
        delta = loadNow16(params.delta + offset);
        residual = params.residual != nullptr ? loadNow16(params.residual + offset) : make_uint4(0, 0, 0, 0);
    }
};

/// Columns of s that one thread owns, in FP32.
struct NormSegment {
    float s[kNORM_COLUMNS];

    /// s; returns the sum of its squares.
    __device__ __forceinline__ float add(NormInputs const& inputs) {
        uint4 const d = inputs.delta, r = inputs.residual;
        uint32_t const dw[4] = {d.x, d.y, d.z, d.w};
        uint32_t const rw[4] = {r.x, r.y, r.z, r.w};
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 const a = unpackBf16(dw[i]), b = unpackBf16(rw[i]);
            s[2 * i] = a.x + b.x;
            s[2 * i + 1] = a.y + b.y;
            squares += s[2 * i] * s[2 * i] + s[2 * i + 1] * s[2 * i + 1];
        }
        return squares;
    }

    __device__ __forceinline__ void storeResidual(NormParams const& params, int64_t offset) const {
        *reinterpret_cast<uint4*>(params.residual_out + offset) =
            make_uint4(packBf16(s[0], s[1]), packBf16(s[2], s[3]), packBf16(s[4], s[5]), packBf16(s[6], s[7]));
    }

    /// The normalised values of columns (c, c + 2) for c = 0, 1, 4, 5: pairs as activationOrder has them.
    __device__ __forceinline__ uint4 pairs(float scale, float4 w0, float4 w1) const {
        return make_uint4(
            packBf16(s[0] * scale * w0.x, s[2] * scale * w0.z), packBf16(s[1] * scale * w0.y, s[3] * scale * w0.w),
            packBf16(s[4] * scale * w1.x, s[6] * scale * w1.z), packBf16(s[5] * scale * w1.y, s[7] * scale * w1.w));
    }
};

/// Which columns a thread of a block of THREADS threads normalises: the same of every row.
template <int H, int THREADS>
struct NormShare {
    static constexpr int kSEGMENTS = H / kNORM_COLUMNS;                          ///< of a row
    static constexpr int kPER_THREAD = (kSEGMENTS + THREADS - 1) / THREADS;      ///< segments that one thread takes
    static constexpr int kROWS = kSEGMENTS >= THREADS ? 1 : THREADS / kSEGMENTS; ///< rows that are in work together
    static_assert(kSEGMENTS % THREADS == 0 || THREADS % kSEGMENTS == 0);

    static __device__ __forceinline__ int column(int i) {
        int const segment = kROWS == 1 ? threadIdx.x : threadIdx.x % kSEGMENTS;
        return (segment + i * THREADS) * kNORM_COLUMNS;
    }
};

/// Shared memory of a block that normalises rows.
template <int H, int THREADS>
struct NormScratch {
    using Share = NormShare<H, THREADS>;
    alignas(16) float weights[H];
    float sums[THREADS / kWARP];

    /// Start bringing the norm weights, before the wait for the activations: each thread those that it will use, or,
    /// where a block has several rows at once, the first row's threads for all of them. Not into registers, which are
    /// full of the projection's weights then: the assembler would load them behind the wait.
    __device__ __forceinline__ void prefetch(float const* source) {
#pragma unroll
        for (int i = 0; i < Share::kPER_THREAD; ++i) {
            if (Share::kROWS == 1 || threadIdx.x < Share::kSEGMENTS) {
                int const column = Share::column(i);
                copyAsync16(sharedAddress(weights + column), source + column);
                copyAsync16(sharedAddress(weights + column + 4), source + column + 4);
            }
        }
        commitCopies();
    }
};

/// Normalise up to TOKENS rows into shared memory (`SharedX<TOKENS>`), by a whole block of THREADS threads, whose
/// `scratch` has prefetched; rows from `tokens` (at least 1) on are zeros. Ends with a barrier.
///
/// `source(token)` is the row of delta and residual to take; `keep(token, column, pairs)` is called with every 8
/// columns' normalised pairs (see NormSegment::pairs).
template <int H, int TOKENS, int THREADS, typename Source, typename Keep>
__device__ __forceinline__ void normalizeRows(NormParams const& params, NormScratch<H, THREADS>& scratch,
                                              bool writeResidual, uint32_t* x, Source const& source, Keep const& keep) {
    using Share = NormShare<H, THREADS>;
    constexpr int SEGMENTS = Share::kSEGMENTS, ROWS = Share::kROWS, PER_THREAD = Share::kPER_THREAD;
    constexpr int WIDTH = SEGMENTS < kWARP ? SEGMENTS : kWARP; // lanes of a warp that share a row
    int const thread = threadIdx.x;
    for (int first = 0; first < TOKENS; first += ROWS) {
        int const token = first + (ROWS == 1 ? 0 : thread / SEGMENTS);
        bool const live = (TOKENS == 1 && ROWS == 1) || token < params.tokens;
        int64_t const offset = live ? int64_t{source(token)} * H : 0;
        NormInputs inputs[PER_THREAD];
        NormSegment parts[PER_THREAD];
        float squares = 0;
        if (live) {
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
                inputs[i].load(params, offset + Share::column(i));
            }
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
                squares += parts[i].add(inputs[i]);
            }
        }
        squares = warpSum<WIDTH>(squares);
        if constexpr (SEGMENTS > kWARP) {
            if (first > 0) {
                __syncthreads(); // the previous round has read `sums`
            }
            if (thread % kWARP == 0) {
                scratch.sums[thread / kWARP] = squares;
            }
            __syncthreads();
            constexpr int WARPS = (SEGMENTS < THREADS ? SEGMENTS : THREADS) / kWARP; // of a row
            int const base = ROWS == 1 ? 0 : thread / SEGMENTS * WARPS;
            squares = 0;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                squares += scratch.sums[base + i];
            }
        }
        if (first == 0) {
            waitCopies<0>();
            if constexpr (ROWS > 1) {
                __syncthreads(); // other threads' copies, too
            }
        }
        float const scale = rsqrtf(squares / H + params.eps);
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            int const column = Share::column(i);
            auto const* const weights = reinterpret_cast<float4 const*>(scratch.weights + column);
            uint4 const pairs = live ? parts[i].pairs(scale, weights[0], weights[1]) : make_uint4(0, 0, 0, 0);
            if (token < TOKENS) {
                SharedX<TOKENS>::store(x, token, column, pairs);
            }
            if (live) {
                if (writeResidual && params.residual_out != nullptr) {
                    parts[i].storeResidual(params, offset + column);
                }
                keep(token, column, pairs);
            }
        }
    }
    __syncthreads();
}

/// The one token of a step, with nothing kept.
template <int H, int THREADS>
__device__ __forceinline__ void normalizeToken(NormParams const& params, NormScratch<H, THREADS>& scratch,
                                               bool writeResidual, uint32_t* x) {
    normalizeRows<H, 1, THREADS>(
        params, scratch, writeResidual, x, [](int token) { return token; }, [](int, int, uint4) {});
}

} // namespace flint
