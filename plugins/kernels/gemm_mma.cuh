// The arithmetic of one K-tile with mma.sync: the path of every target, and of the small tiles.
#pragma once

#include "kernels/gemm_load.cuh"

namespace flint {

/// acc[panel][8 tokens][d of m16n8] += panels x tokens over a K-tile; `activations`: its rows in shared memory. Slices
/// of tokens that hold none of the `count` positions are left out. The branches also keep ptxas from loading operands
/// too far ahead: without them the large tile spills.
template <typename C>
__device__ __forceinline__ void multiplyOperands(float (&acc)[C::PANELS][C::TOKENS / 8][4],
                                                 uint32_t const (&a)[C::PANELS][4][4], uint32_t activations, int count,
                                                 int lane) {
    // Lane l addresses row l % 8 of matrix l / 8: 8 tokens at four chunks, the operands of two instructions.
    int const token = lane % 8;
    uint32_t const row = activations + token * 128;
    constexpr int STEPS = C::SLICE / 8;
#pragma unroll
    for (int slice = 0; slice < C::TOKENS / C::SLICE; ++slice) {
        if (slice * C::SLICE < count) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t const chunk = ((half * 4 + lane / 8) ^ token) << 4;
                uint32_t b[STEPS][4];
#pragma unroll
                for (int n = 0; n < STEPS; ++n) {
                    ldmatrix4(b[n], row + chunk + (slice * STEPS + n) * 1024);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int n = 0; n < STEPS; ++n) {
#pragma unroll
                        for (int p = 0; p < C::PANELS; ++p) {
                            mma16816(acc[p][slice * STEPS + n], a[p][half * 2 + i], b[n][2 * i], b[n][2 * i + 1]);
                        }
                    }
                }
            }
        }
    }
}

/// The same for the K-tile in `stage`.
template <typename C>
__device__ __forceinline__ void multiplyTile(float (&acc)[C::PANELS][C::TOKENS / 8][4], GemmWeights<C> const& weights,
                                             uint32_t activations, int stage, int count, int lane) {
    uint32_t a[C::PANELS][4][4];
#pragma unroll
    for (int p = 0; p < C::PANELS; ++p) {
        weights.load(stage, p).operands(a[p]);
    }
    multiplyOperands<C>(acc, a, activations + stage * C::X_BYTES, count, lane);
}

} // namespace flint
