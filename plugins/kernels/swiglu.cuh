// SwiGLU's two roundings, by the numerics rules.
#pragma once

#include "kernels/device.cuh"

namespace flint {

/// Dense and shared: gate and up rounded to BF16, act = r(g / (1 + exp(-g)) * u).
__device__ __forceinline__ bf16 swigluRounded(float gate, float up) {
    float const g = roundBf16(gate), u = roundBf16(up);
    return __float2bfloat16_rn(g / (1.0f + __expf(-g)) * u);
}

/// Routed: gate and up stay FP32.
__device__ __forceinline__ bf16 swigluRouted(float gate, float up) {
    return __float2bfloat16_rn(gate / (1.0f + __expf(-gate)) * up);
}

/// Tensor scales of gate and up, loaded here and now: behind the product they would be waited for.
struct GateUpScales {
    float gate = 1.0f, up = 1.0f;

    GateUpScales() = default;

    /// `pair`: gate's and up's; nullptr in BF16.
    __device__ __forceinline__ GateUpScales(float const* pair, float restore) {
        if (pair != nullptr) {
            float2 const both = loadNow8(pair);
            gate = both.x;
            up = both.y;
        }
        gate *= restore;
        up *= restore;
    }
};

} // namespace flint
