// What follows the QKV projection: q/k norm and RoPE.
#pragma once

#include "kernels/device.cuh"
#include "kernels/qkv.h"

namespace flint {

/// For four dimensions of a head, as one lane of 32 has them: low = 2 lane, low + 1, and RoPE's partners (NeoX halves),
/// 64 further on. None of it depends on the projection.
struct HeadQuad {
    float2 lowWeight, highWeight, cosine, sine;

    /// `weight` [128] f32: of q's or k's norm. `rope`: QkvParams::rope.
    static __device__ __forceinline__ HeadQuad load(float const* weight, float const* rope, int position, int low) {
        HeadQuad quad{};
        quad.lowWeight = loadNow8(weight + low);
        quad.highWeight = loadNow8(weight + low + flint::kHEAD_DIM / 2);
        if (rope != nullptr) {
            float const* const table = rope + int64_t{position} * flint::kHEAD_DIM;
            quad.cosine = loadNow8(table + low);
            quad.sine = loadNow8(table + low + flint::kHEAD_DIM / 2);
        }
        return quad;
    }

    /// Norm and, if `rotates`, RoPE of a warp's head: (low, low + 1) in words[0] and the partners in words[1].
    __device__ __forceinline__ void finish(float eps, bool rotates, uint32_t (&words)[2]) const {
        float2 const a = unpackBf16(words[0]), b = unpackBf16(words[1]);
        float const squares = warpSum((a.x * a.x + a.y * a.y) + (b.x * b.x + b.y * b.y));
        float const inverse = rsqrtf(squares / flint::kHEAD_DIM + eps);
        float2 first = rounded(a.x * inverse * lowWeight.x, b.x * inverse * highWeight.x);
        float2 second = rounded(a.y * inverse * lowWeight.y, b.y * inverse * highWeight.y);
        if (rotates) {
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

} // namespace flint
