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
    __device__ __forceinline__ uint4 pairs(float scale, float const* weight) const {
        float4 const w0 = *reinterpret_cast<float4 const*>(weight);
        float4 const w1 = *reinterpret_cast<float4 const*>(weight + 4);
        return make_uint4(
            packBf16(s[0] * scale * w0.x, s[2] * scale * w0.z), packBf16(s[1] * scale * w0.y, s[3] * scale * w0.w),
            packBf16(s[4] * scale * w1.x, s[6] * scale * w1.z), packBf16(s[5] * scale * w1.y, s[7] * scale * w1.w));
    }
};

/// Normalise up to TOKENS rows into shared memory (`SharedX<TOKENS>`), by a whole block of THREADS threads; rows from
/// `tokens` on are zeros. `sums` are THREADS / 32 floats of shared memory. Ends with a barrier.
///
/// `source(token)` is the row of delta and residual to take; `keep(token, column, pairs)` is called with every 8
/// columns' normalised pairs (see NormSegment::pairs).
template <int H, int TOKENS, int THREADS, typename Source, typename Keep>
__device__ __forceinline__ void normalizeRows(NormParams const& params, bool writeResidual, uint32_t* x, float* sums,
                                              Source const& source, Keep const& keep) {
    constexpr int SEGMENTS = H / kNORM_COLUMNS;                        // of a row
    constexpr int PER_THREAD = (SEGMENTS + THREADS - 1) / THREADS;     // segments of a row that one thread takes
    constexpr int ROWS = SEGMENTS >= THREADS ? 1 : THREADS / SEGMENTS; // rows that are in work together
    constexpr int WIDTH = SEGMENTS < kWARP ? SEGMENTS : kWARP;         // lanes of a warp that share a row
    static_assert(SEGMENTS % THREADS == 0 || THREADS % SEGMENTS == 0);
    int const thread = threadIdx.x;
    for (int first = 0; first < TOKENS; first += ROWS) {
        int const token = first + (ROWS == 1 ? 0 : thread / SEGMENTS);
        int const segment = ROWS == 1 ? thread : thread % SEGMENTS;
        bool const live = token < params.tokens;
        int64_t const offset = live ? int64_t{source(token)} * H : 0;
        NormSegment parts[PER_THREAD];
        float squares = 0;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            int const column = (segment + i * THREADS) * kNORM_COLUMNS;
            squares += live ? parts[i].load(params, offset + column) : 0.0f;
        }
        squares = warpSum<WIDTH>(squares);
        if constexpr (SEGMENTS > kWARP) {
            __syncthreads(); // the previous round has read `sums`
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
        for (int i = 0; i < PER_THREAD; ++i) {
            int const column = (segment + i * THREADS) * kNORM_COLUMNS;
            uint4 const pairs = live ? parts[i].pairs(scale, params.weight + column) : make_uint4(0, 0, 0, 0);
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

/// The common case: rows in order, nothing kept.
template <int H, int TOKENS, int THREADS>
__device__ __forceinline__ void normalizeRows(NormParams const& params, bool writeResidual, uint32_t* x, float* sums) {
    normalizeRows<H, TOKENS, THREADS>(
        params, writeResidual, x, sums, [](int token) { return token; }, [](int, int, uint4) {});
}

} // namespace flint
