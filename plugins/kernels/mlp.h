// NormMlp: residual add, RMSNorm, dense SwiGLU.
#pragma once

#include "kernels/types.h"

#include <cuda_runtime_api.h>

namespace flint {

struct MlpParams {
    bf16 const* delta;          ///< [T, H] bf16
    bf16 const* residual;       ///< [T, H] bf16
    float const* norm;          ///< [H] f32
    uint8_t const* gate_up;     ///< interleaved panels of [2 I, H]
    float const* gate_up_scale; ///< [2] f32: gate, up; nullptr in BF16
    uint8_t const* down;        ///< panels of [H, I]
    float const* down_scale;    ///< [1] f32; nullptr in BF16
    bf16* out;                  ///< [T, H] bf16
    bf16* residual_out;         ///< [T, H] bf16
    void* workspace;            ///< mlpWorkspaceBytes
    WeightFormat format;
    float eps;
    int tokens;       ///< T
    int hidden;       ///< H
    int intermediate; ///< I
};

size_t mlpWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t intermediate);

/// Returns cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchMlp(MlpParams const& params, cudaStream_t stream);

} // namespace flint
