// Residual add and RMSNorm of several rows into global memory, in one of the orders that matrix products read.
#pragma once

#include "kernels/norm.cuh"

#include <cuda_runtime_api.h>

namespace flint {

enum class RowOrder {
    kDECODE,  ///< each 16 columns in activationOrder
    kPREFILL, ///< each 64 columns in gemmOrder
};

/// x [T, H] bf16, ordered; also writes params.residual_out if it is not nullptr.
/// Returns cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchNormRows(NormParams const& params, int hidden, RowOrder order, bf16* x, cudaStream_t stream);

} // namespace flint
