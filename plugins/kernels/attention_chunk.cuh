// Decode: what a warp does with a chunk of keys, operands swapped (attention_decode.cu).
#pragma once

#include "kernels/attention_items.cuh"

namespace flint::attention {

/// What a warp knows of `Tokens` tokens: the lane's heads 2t, 2t + 1 (t = lane % 4), and of each 16 dimensions d the
/// rows d + g, d + g + 8 (g = lane / 4).
template <int Tokens>
struct WarpState {
    uint32_t q[Tokens][kHEAD_DIM / 16][2];
    float out[Tokens][kHEAD_DIM / 16][4];
    float top[Tokens][2];
    float sum[Tokens][2]; // Over this lane's keys only.
    int position[Tokens];
};

/// Visible keys of a chunk to probabilities, and the state brought to the new maximum. s: S^T fragments; returns P^T as
/// the B operand.
template <int Tokens>
__device__ __forceinline__ void softmaxChunk(WarpState<Tokens>& state, int n, float (&s)[4], bool masked, int first,
                                             int window, uint32_t (&p)[2]) {
    int const lane = threadIdx.x % kWARP;
    if (masked) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int const key = first + lane / 4 + (i / 2) * 8;
            bool const visible = key <= state.position[n] && key > state.position[n] - window;
            s[i] = visible ? s[i] : kMINUS_INFINITY;
        }
    }
    float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (int mask = 4; mask < kWARP; mask *= 2) {
        top[0] = fmaxf(top[0], __shfl_xor_sync(0xFFFFFFFFu, top[0], mask));
        top[1] = fmaxf(top[1], __shfl_xor_sync(0xFFFFFFFFu, top[1], mask));
    }
    bool const raised = top[0] > state.top[n][0] || top[1] > state.top[n][1];
    if (__any_sync(0xFFFFFFFFu, raised)) {
        float factor[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            top[j] = fmaxf(top[j], state.top[n][j]);
            factor[j] = rescale(state.top[n][j], top[j]);
            state.top[n][j] = top[j];
            state.sum[n][j] *= factor[j];
        }
#pragma unroll
        for (auto& tile : state.out[n]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                tile[i] *= factor[i % 2];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // A head that has seen no key yet has top = -infinity, and -infinity - -infinity is NaN.
        float const base = state.top[n][i % 2] == kMINUS_INFINITY ? 0.0f : state.top[n][i % 2];
        s[i] = exp2Fast(s[i] - base);
        state.sum[n][i % 2] += s[i];
    }
    p[0] = transpose8x8(packBf16(s[0], s[1]));
    p[1] = transpose8x8(packBf16(s[2], s[3]));
}

template <int Tokens>
__device__ __forceinline__ void attendChunk(WarpState<Tokens>& state, uint32_t stage, bool masked, int first,
                                            int window, int lane) {
    // Two accumulators: a chain of eight dependent instructions would set the pace.
    float s[Tokens][2][4] = {};
    uint32_t const k = stage + swizzled(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kHEAD_DIM / 16; ++step) {
        uint32_t a[4];
        ldmatrix4(a, k ^ (step * 32));
#pragma unroll
        for (int n = 0; n < Tokens; ++n) {
            mma16816(s[n][step % 2], a, state.q[n][step][0], state.q[n][step][1]);
        }
    }
    uint32_t p[Tokens][2];
#pragma unroll
    for (int n = 0; n < Tokens; ++n) {
        float logits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            logits[i] = (s[n][0][i] + s[n][1][i]) * kLOGIT_SCALE;
        }
        softmaxChunk(state, n, logits, masked, first, window, p[n]);
    }
    uint32_t const v = stage + kCHUNK * kROW_BYTES + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int tile = 0; tile < kHEAD_DIM / 16; ++tile) {
        uint32_t a[4];
        ldmatrix4Transposed(a, v ^ (tile * 32));
#pragma unroll
        for (int n = 0; n < Tokens; ++n) {
            mma16816(state.out[n][tile], a, p[n][0], p[n][1]);
        }
    }
}

} // namespace flint::attention
