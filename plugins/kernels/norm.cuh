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

/// Columns of s that one thread owns, in FP32.
struct NormSegment {
    float s[kNORM_COLUMNS];

    __device__ __forceinline__ float load(NormParams const& params, int64_t offset) {
        uint4 const d = *reinterpret_cast<uint4 const*>(params.delta + offset);
        uint4 r = make_uint4(0, 0, 0, 0);
        if (params.residual != nullptr) {
            r = *reinterpret_cast<uint4 const*>(params.residual + offset);
        }
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

/// A thread's norm weights, loaded before the wait for the activations.
template <int H, int THREADS>
struct NormWeights {
    float4 values[NormShare<H, THREADS>::kPER_THREAD][2];

    __device__ __forceinline__ explicit NormWeights(float const* weight) {
#pragma unroll
        for (int i = 0; i < NormShare<H, THREADS>::kPER_THREAD; ++i) {
            auto const* const source = reinterpret_cast<float4 const*>(weight + NormShare<H, THREADS>::column(i));
            values[i][0] = __ldg(source);
            values[i][1] = __ldg(source + 1);
        }
    }
};

/// Normalise up to TOKENS rows into shared memory (`SharedX<TOKENS>`), by a whole block of THREADS threads; rows from
/// `tokens` on are zeros. `sums` are THREADS / 32 floats of shared memory. Ends with a barrier.
///
/// `source(token)` is the row of delta and residual to take; `keep(token, column, pairs)` is called with every 8
/// columns' normalised pairs (see NormSegment::pairs).
template <int H, int TOKENS, int THREADS, typename Source, typename Keep>
__device__ __forceinline__ void normalizeRows(NormParams const& params, NormWeights<H, THREADS> const& weights,
                                              bool writeResidual, uint32_t* x, float* sums, Source const& source,
                                              Keep const& keep) {
    using Share = NormShare<H, THREADS>;
    constexpr int SEGMENTS = Share::kSEGMENTS, ROWS = Share::kROWS;
    constexpr int WIDTH = SEGMENTS < kWARP ? SEGMENTS : kWARP; // lanes of a warp that share a row
    int const thread = threadIdx.x;
    for (int first = 0; first < TOKENS; first += ROWS) {
        int const token = first + (ROWS == 1 ? 0 : thread / SEGMENTS);
        bool const live = token < params.tokens;
        int64_t const offset = live ? int64_t{source(token)} * H : 0;
        NormSegment parts[Share::kPER_THREAD];
        float squares = 0;
#pragma unroll
        for (int i = 0; i < Share::kPER_THREAD; ++i) {
            squares += live ? parts[i].load(params, offset + Share::column(i)) : 0.0f;
        }
        squares = warpSum<WIDTH>(squares);
        if constexpr (SEGMENTS > kWARP) {
            if (first > 0) {
                __syncthreads(); // the previous round has read `sums`
            }
            if (thread % kWARP == 0) {
                sums[thread / kWARP] = squares;
            }
            __syncthreads();
            constexpr int WARPS = (SEGMENTS < THREADS ? SEGMENTS : THREADS) / kWARP; // of a row
            int const base = ROWS == 1 ? 0 : thread / SEGMENTS * WARPS;
            squares = 0;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                squares += sums[base + i];
            }
        }
        float const scale = rsqrtf(squares / H + params.eps);
#pragma unroll
        for (int i = 0; i < Share::kPER_THREAD; ++i) {
            int const column = Share::column(i);
            uint4 const pairs =
                live ? parts[i].pairs(scale, weights.values[i][0], weights.values[i][1]) : make_uint4(0, 0, 0, 0);
            if (token < TOKENS) {
                x[SharedX<TOKENS>::word(token, column)] = pairs.x;
                x[SharedX<TOKENS>::word(token, column + 1)] = pairs.y;
                x[SharedX<TOKENS>::word(token, column + 4)] = pairs.z;
                x[SharedX<TOKENS>::word(token, column + 5)] = pairs.w;
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
__device__ __forceinline__ void normalizeToken(NormParams const& params, NormWeights<H, THREADS> const& weights,
                                               bool writeResidual, uint32_t* x, float* sums) {
    normalizeRows<H, 1, THREADS>(
        params, weights, writeResidual, x, sums, [](int token) { return token; }, [](int, int, uint4) {});
}

} // namespace flint
