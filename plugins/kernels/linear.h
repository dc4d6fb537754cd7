// Linear: y = x W^T.
#pragma once

#include "kernels/types.h"

#include <cuda_runtime_api.h>

namespace flint {

struct LinearParams {
    bf16 const* x;         ///< [T, K] bf16
    uint8_t const* weight; ///< panels of [N, K]
    float const* scale;    ///< [1] f32; nullptr in BF16
    bf16* y;               ///< [T, N] bf16
    void* workspace;       ///< linearWorkspaceBytes
    WeightFormat format;
    bool ordered; ///< x has each 16 columns in activationOrder
    int tokens;   ///< T
    int columns;  ///< K
    int rows;     ///< N
};

size_t linearWorkspaceBytes(int64_t tokens, int64_t columns);

/// Any K that is a multiple of 64, any N that is one of 16.
cudaError_t launchLinear(LinearParams const& params, cudaStream_t stream);

/// Whether the low-latency kernel has an instance for plain x and K = `columns`.
bool hasLinearDecode(int columns);

/// The low-latency kernel, for up to kDECODE_TOKENS tokens; needs no workspace.
/// Returns cudaErrorInvalidValue for a K that has no instance.
cudaError_t launchLinearDecode(LinearParams const& params, cudaStream_t stream);

} // namespace flint
