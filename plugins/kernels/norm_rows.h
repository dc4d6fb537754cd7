// Residual add and RMSNorm of many rows, into the order that prefill's matrix products read.
#pragma once

#include "kernels/norm.cuh"

#include <cuda_runtime_api.h>

namespace flint {

/// x [T, H] bf16, each 64 columns in gemmOrder; also writes params.residual_out if it is not nullptr.
/// Returns cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchNormRows(NormParams const& params, int hidden, bf16* x, cudaStream_t stream);

} // namespace flint
