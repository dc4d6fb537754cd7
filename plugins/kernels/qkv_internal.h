// The two paths of NormQkvRope, and the rotation they share.
#pragma once

#include "kernels/device.cuh"
#include "kernels/qkv.h"

namespace flint {

/// Up to kDECODE_TOKENS tokens, one kernel.
cudaError_t launchQkvDecode(QkvParams const& params, cudaStream_t stream);

/// RoPE (NeoX halves) of dimension `dim`: `other` is the value 64 dimensions away, `table` the position's cos | sin.
/// In FP32; the caller rounds.
__device__ __forceinline__ float rotate(float value, float other, float const* table, int dim) {
    constexpr int HALF = kHEAD_DIM / 2;
    float const cosine = __ldg(table + dim % HALF), sine = __ldg(table + HALF + dim % HALF);
    return dim < HALF ? value * cosine - other * sine : value * cosine + other * sine;
}

} // namespace flint
