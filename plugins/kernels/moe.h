// NormMoe: residual add, RMSNorm, router, top-k routed experts, shared expert, combine.
#pragma once

#include "kernels/types.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

constexpr int kTOP_K = 6;

struct MoeParams {
    bf16 const* delta;              ///< [T, H] bf16
    bf16 const* residual;           ///< [T, H] bf16
    float const* norm;              ///< [H] f32
    void const* router;             ///< [E, H] bf16 or f32
    uint8_t const* up;              ///< per expert, interleaved panels of [2 I, H] (gate and up)
    float const* up_scale;          ///< [E, 2] f32: gate, up; nullptr in BF16
    uint8_t const* down;            ///< per expert, panels of [H, I]
    float const* down_scale;        ///< [E] f32; nullptr in BF16
    uint8_t const* shared_up;       ///< interleaved panels of [2 S, H]
    float const* shared_up_scale;   ///< [2] f32; nullptr in BF16
    uint8_t const* shared_down;     ///< panels of [H, S]
    float const* shared_down_scale; ///< [1] f32; nullptr in BF16
    bf16* out;                      ///< [T, H] bf16
    bf16* residual_out;             ///< [T, H] bf16
    void* workspace;                ///< moeWorkspaceBytes
    WeightFormat format;
    bool router_f32;
    float eps;
    int tokens;       ///< T
    int hidden;       ///< H
    int experts;      ///< E
    int intermediate; ///< I
    int shared;       ///< S
};

size_t moeWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t experts, int64_t intermediate, int64_t shared);

/// Returns cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchMoe(MoeParams const& params, cudaStream_t stream);

} // namespace flint
