// What follows the QKV projection: q/k norm, RoPE, and where a head of a token is written.
#pragma once

#include "kernels/device.cuh"
#include "kernels/kv_write.cuh"

namespace flint {

/// Four dimensions of a token's head, as one thread has them: low, low + 1, and RoPE's partners (NeoX halves), 64
/// further on. Here is what the step's arrays and the weights say of them; none of it depends on the projection.
struct HeadQuad {
    bf16* target; ///< the head's vector; nullptr for padding
    float2 lowWeight, highWeight, cosine, sine;

    /// `head`: q heads, then k, then v.
    static __device__ __forceinline__ HeadQuad load(QkvParams const& params, int token, int head, int low) {
        HeadQuad quad{};
        bool const isQ = head < params.heads, isK = !isQ && head < params.heads + params.kv_heads;
        int const position = static_cast<int>(loadNow4(params.positions + token));
        if (isQ || isK) {
            float const* const weight = isQ ? params.q_norm : params.k_norm;
            quad.lowWeight = loadNow8(weight + low);
            quad.highWeight = loadNow8(weight + low + kHEAD_DIM / 2);
            if (params.rope != nullptr) {
                float const* const table = params.rope + int64_t{position} * kHEAD_DIM;
                quad.cosine = loadNow8(table + low);
                quad.sine = loadNow8(table + low + kHEAD_DIM / 2);
            }
        }
        if (isQ) {
            quad.target = params.q + (int64_t{token} * params.heads + head) * kHEAD_DIM;
        } else {
            int const kvHead = head - params.heads - (isK ? 0 : params.kv_heads);
            quad.target = kvVector(params.kv, token, position, kvHead, isK ? 0 : 1);
        }
        return quad;
    }

    /// Norm and RoPE of (low, low + 1) in words[0] and the partners in words[1]; `squares`: of the whole head.
    __device__ __forceinline__ void finish(QkvParams const& params, float squares, uint32_t (&words)[2]) const {
        float2 const a = unpackBf16(words[0]), b = unpackBf16(words[1]);
        float const inverse = rsqrtf(squares / kHEAD_DIM + params.eps);
        float2 first = rounded(a.x * inverse * lowWeight.x, b.x * inverse * highWeight.x);
        float2 second = rounded(a.y * inverse * lowWeight.y, b.y * inverse * highWeight.y);
        if (params.rope != nullptr) {
            first = rotate(first, cosine.x, sine.x);
            second = rotate(second, cosine.y, sine.y);
        }
        words[0] = packBf16(first.x, second.x);
        words[1] = packBf16(first.y, second.y);
    }

  private:
    /// r() of both; as a pair, for the conversion of one is slow.
    static __device__ __forceinline__ float2 rounded(float x, float y) { return unpackBf16(packBf16(x, y)); }

    /// RoPE of a dimension and its partner, in FP32; the caller rounds.
    static __device__ __forceinline__ float2 rotate(float2 pair, float cosine, float sine) {
        return make_float2(pair.x * cosine - pair.y * sine, pair.y * cosine + pair.x * sine);
    }
};

/// Sum of the squares of a packed pair.
__device__ __forceinline__ float pairSquares(uint32_t pair) {
    float2 const values = unpackBf16(pair);
    return values.x * values.x + values.y * values.y;
}

} // namespace flint
