// From accumulators to memory: tensor scale, SwiGLU, rounding, and a turn through shared memory so that rows of the
// output are written in whole sectors.
#pragma once

#include "kernels/gemm_load.cuh"
#include "kernels/gemm_order.cuh"

#include <cstdint>

namespace flint {

namespace detail {

__device__ __forceinline__ void storeMatrices(uint32_t address, uint32_t const (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

__device__ __forceinline__ void storeMatrices(uint32_t address, uint32_t const (&m)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(m[0]), "r"(m[1])
                 : "memory");
}

/// g / (1 + exp(-g)) * u with a relative error near 2^-21 before the rounding. exp overflows to infinity for g < -88,
/// where the quotient is zero to BF16.
__device__ __forceinline__ float swiGlu(float gate, float up) {
    constexpr float LOG2_E = 1.4426950408889634f;
    float exponential, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(gate * -LOG2_E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + exponential));
    return gate * reciprocal * up;
}

} // namespace detail

/// Store one output tile of up to TOKENS positions. Ends without a barrier: the caller has one before the next.
template <typename C, int TOKENS>
struct GemmStore;

template <typename C, int TOKENS>
    requires(C::EPILOGUE == GemmEpilogue::kStore)
struct GemmStore<C, TOKENS> {
    static constexpr int CHUNKS = C::OUT_ROW_BYTES / 16; ///< 16-byte chunks, of 8 rows each, of a token
    static constexpr int STEPS = C::SLICE / 8;

    static constexpr int SLICES = TOKENS / C::SLICE;
    static constexpr int ITEMS = C::SLICE * CHUNKS / C::THREADS; ///< chunks of a slice that a thread copies out
    static_assert(C::SLICE * CHUNKS % C::THREADS == 0);

    float factor[C::PANELS];
    int32_t rows[SLICES][ITEMS]; ///< of y

    __device__ GemmStore(GemmProblem const& problem, GemmWork const& work, int warp) {
#pragma unroll
        for (int p = 0; p < C::PANELS; ++p) {
            factor[p] = kRESTORE<C::FORMAT>;
            if (problem.scale != nullptr) {
                int const panel = min(work.panel + C::blockPanel(warp, p), problem.panels - 1);
                int const segment = (panel >= problem.segment_panels[0]) + (panel >= problem.segment_panels[1]);
                factor[p] *= problem.scale[work.expert * problem.scale_stride + segment];
            }
        }
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                int const token = slice * C::SLICE + (static_cast<int>(threadIdx.x) + i * C::THREADS) / CHUNKS;
                int const position = work.first + min(token, work.count - 1);
                rows[slice][i] = problem.y_rows != nullptr ? problem.y_rows[position] : position;
            }
        }
    }

    /// Stage: [SLICE tokens][CHUNKS], chunk c of a token at c ^ (token % 8).
    __device__ void run(GemmProblem const& problem, GemmWork const& work, float (&acc)[C::PANELS][C::TOKENS / 8][4],
                        uint8_t* out, int warp, int lane) const {
        // Matrix m of stmatrix, addressed by lanes 8m .. 8m + 7: chunk m % 2 of panel m / 2.
        int const token = lane % 8;
        int const matrix = lane / 8 % (2 * C::PANELS);
        int const chunk = C::blockPanel(warp, matrix / 2) * 2 + matrix % 2;
        uint32_t const target = sharedAddress(out) + token * C::OUT_ROW_BYTES + ((chunk ^ token) << 4);
#pragma unroll
        for (int slice = 0; slice < TOKENS / C::SLICE; ++slice) {
            int const left = work.count - slice * C::SLICE;
            if (left <= 0) {
                continue;
            }
            if (slice > 0) {
                __syncthreads();
            }
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
                uint32_t pairs[2 * C::PANELS];
#pragma unroll
                for (int p = 0; p < C::PANELS; ++p) {
                    float const(&d)[4] = acc[p][slice * STEPS + n];
                    pairs[2 * p] = packBf16(d[0] * factor[p], d[1] * factor[p]);
                    pairs[2 * p + 1] = packBf16(d[2] * factor[p], d[3] * factor[p]);
                }
                detail::storeMatrices(target + n * 8 * C::OUT_ROW_BYTES, pairs);
            }
            __syncthreads();
            copyOut(problem, work, out, rows[slice], left);
        }
    }

    __device__ static void copyOut(GemmProblem const& problem, GemmWork const& work, uint8_t const* out,
                                   int32_t const (&rows)[ITEMS], int count) {
        int const chunks = min(CHUNKS, 2 * (problem.panels - work.panel));
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            int const item = static_cast<int>(threadIdx.x) + i * C::THREADS;
            int const token = item / CHUNKS;
            int const chunk = item % CHUNKS;
            if (token < count && chunk < chunks) {
                uint4 const value =
                    *reinterpret_cast<uint4 const*>(out + token * C::OUT_ROW_BYTES + ((chunk ^ (token & 7)) << 4));
                int64_t const offset = static_cast<int64_t>(rows[i]) * problem.panels + work.panel;
                *reinterpret_cast<uint4*>(problem.y + offset * 32 + chunk * 16) = value;
            }
        }
    }
};

template <typename C, int TOKENS>
    requires(C::EPILOGUE == GemmEpilogue::kSwiGlu)
struct GemmStore<C, TOKENS> {
    static constexpr int WORDS = C::BLOCK_PANELS * 4; ///< pairs of units of a token
    static constexpr int STEPS = C::SLICE / 8;
    static_assert(C::BLOCK_PANELS % 8 == 0, "whole 64-unit tiles of the ordered activation");

    float gateFactor = kRESTORE<C::FORMAT>, upFactor = kRESTORE<C::FORMAT>;

    __device__ GemmStore(GemmProblem const& problem, GemmWork const& work, int) {
        if (problem.scale != nullptr) {
            gateFactor *= problem.scale[work.expert * 2];
            upFactor *= problem.scale[work.expert * 2 + 1];
        }
    }

    /// Stage: [SLICE tokens][WORDS + 1] pairs in gemmOrder. The odd row length gives each of the 8 tokens and 4
    /// instructions that a warp stores at once its own bank.
    __device__ void run(GemmProblem const& problem, GemmWork const& work, float (&acc)[C::PANELS][C::TOKENS / 8][4],
                        uint8_t* out, int warp, int lane) const {
        // A lane has unit g for tokens 2t and 2t + 1, lane ^ 8 its partner in the ordered pair, unit g ^ 2. They
        // exchange, so that each has both units for one token.
        int const unit = lane / 4;
        bool const second = (unit & 2) != 0;
        int const token = (lane % 4) * 2 + second;
        uint32_t* const stage = reinterpret_cast<uint32_t*>(out);
        int words[C::PANELS];
#pragma unroll
        for (int p = 0; p < C::PANELS; ++p) {
            int const column = C::blockPanel(warp, p) * 8 + (unit & ~2);
            words[p] = token * (WORDS + 1) + column / 64 * 32 + gemmOrder(column % 64) / 2;
        }
#pragma unroll
        for (int slice = 0; slice < TOKENS / C::SLICE; ++slice) {
            int const left = work.count - slice * C::SLICE;
            if (left <= 0) {
                continue;
            }
            if (slice > 0) {
                __syncthreads();
            }
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
#pragma unroll
                for (int p = 0; p < C::PANELS; ++p) {
                    float const(&d)[4] = acc[p][slice * STEPS + n];
                    float2 gate = make_float2(d[0] * gateFactor, d[1] * gateFactor);
                    float2 up = make_float2(d[2] * upFactor, d[3] * upFactor);
                    if (problem.round_gate_up) {
                        gate = unpackBf16(packBf16(gate.x, gate.y));
                        up = unpackBf16(packBf16(up.x, up.y));
                    }
                    float const act[2] = {detail::swiGlu(gate.x, up.x), detail::swiGlu(gate.y, up.y)};
                    float const received = __shfl_xor_sync(0xFFFFFFFFu, second ? act[0] : act[1], 8);
                    stage[words[p] + n * 8 * (WORDS + 1)] =
                        second ? packBf16(received, act[1]) : packBf16(act[0], received);
                }
            }
            __syncthreads();
            copyOut(problem, work, stage, slice * C::SLICE, min(left, C::SLICE));
        }
    }

    __device__ static void copyOut(GemmProblem const& problem, GemmWork const& work, uint32_t const* stage, int first,
                                   int count) {
        constexpr int CHUNKS = WORDS / 4;
        int const chunks = min(CHUNKS, problem.panels - work.panel);
#pragma unroll
        for (int i = 0; i < (C::SLICE * CHUNKS + C::THREADS - 1) / C::THREADS; ++i) {
            int const item = static_cast<int>(threadIdx.x) + i * C::THREADS;
            int const token = item / CHUNKS;
            int const chunk = item % CHUNKS;
            if (token < count && chunk < chunks) {
                int64_t const offset = static_cast<int64_t>(work.first + first + token) * problem.panels + work.panel;
                uint32_t const* const source = stage + token * (WORDS + 1) + chunk * 4;
                *reinterpret_cast<uint4*>(problem.y + offset * 16 + chunk * 16) =
                    make_uint4(source[0], source[1], source[2], source[3]);
            }
        }
    }
};

/// Tensor scales of a panel's rows: of all, twice, or, with kSwiGlu, of gate and of up.
template <GemmEpilogue E>
__device__ __forceinline__ float2 panelScales(GemmProblem const& problem, int expert, int panel) {
    if (problem.scale == nullptr) {
        return make_float2(1.0f, 1.0f);
    }
    constexpr bool GLU = E == GemmEpilogue::kSwiGlu;
    int const segment = (panel >= problem.segment_panels[0]) + (panel >= problem.segment_panels[1]);
    float const* const scales = problem.scale + expert * problem.scale_stride;
    return make_float2(__uint_as_float(loadNow4(scales + (GLU ? 0 : segment))),
                       __uint_as_float(loadNow4(scales + (GLU ? 1 : segment))));
}

/// Stores a panel's rows for eight tokens at a time, from a warp's accumulators straight to y: for products of so few
/// tokens that whole sectors do not count.
template <WeightFormat F, GemmEpilogue E>
struct PanelStore {
    uint32_t* y;   ///< in pairs
    int row_pairs; ///< of a row of y
    int panel, count, lane;
    bool round_gate_up;
    float factor[2]; ///< of a lane's two rows; kSwiGlu: gate, up

    /// `count` tokens; `scales`: tensor scales of its rows.
    __device__ __forceinline__ PanelStore(GemmProblem const& problem, int panel, int count, float2 const& scales,
                                          int lane)
        : y(reinterpret_cast<uint32_t*>(problem.y)), panel(panel), count(count), lane(lane),
          round_gate_up(problem.round_gate_up), factor{kRESTORE<F> * scales.x, kRESTORE<F> * scales.y} {
        row_pairs = problem.panels * (E == GemmEpilogue::kSwiGlu ? kPANEL_ROWS / 4 : kPANEL_ROWS / 2);
    }

    /// `sum`: row g of the panel for tokens 8 step + 2t and the next, then row g + 8; g = lane / 4, t = lane % 4.
    /// `rowOf(token)`: its row of y.
    template <typename RowOf>
    __device__ __forceinline__ void run(int step, float4 const& sum, RowOf const& rowOf) const {
        if constexpr (E == GemmEpilogue::kStore) {
            uint32_t const low = transpose8x8(packBf16(sum.x * factor[0], sum.y * factor[0]));
            uint32_t const high = transpose8x8(packBf16(sum.z * factor[1], sum.w * factor[1]));
            int const token = step * 8 + lane / 4;
            if (token < count) {
                uint32_t* const target = y + int64_t{rowOf(token)} * row_pairs + panel * (kPANEL_ROWS / 2) + lane % 4;
                target[0] = low;
                target[4] = high;
            }
        } else {
            float2 gate = make_float2(sum.x * factor[0], sum.y * factor[0]);
            float2 up = make_float2(sum.z * factor[1], sum.w * factor[1]);
            if (round_gate_up) {
                gate = unpackBf16(packBf16(gate.x, gate.y));
                up = unpackBf16(packBf16(up.x, up.y));
            }
            // A lane has unit g for two tokens, lane ^ 8 its partner in the ordered pair, unit g ^ 2. They exchange, so
            // that each has both units for one token.
            float const act[2] = {detail::swiGlu(gate.x, up.x), detail::swiGlu(gate.y, up.y)};
            int const unit = lane / 4;
            bool const second = (unit & 2) != 0;
            float const received = __shfl_xor_sync(0xFFFFFFFFu, second ? act[0] : act[1], 8);
            int const token = step * 8 + lane % 4 * 2 + second;
            if (token < count) {
                int const column = panel * (kPANEL_ROWS / 2) + (unit & ~2);
                y[int64_t{rowOf(token)} * row_pairs + column / kTILE_COLUMNS * (kTILE_COLUMNS / 2) +
                  gemmOrder(column % kTILE_COLUMNS) / 2] =
                    second ? packBf16(received, act[1]) : packBf16(act[0], received);
            }
        }
    }
};

} // namespace flint
