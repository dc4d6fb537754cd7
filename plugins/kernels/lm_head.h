// LmHead: final residual add, RMSNorm, FP32 logits of the rows asked for.
#pragma once

#include "kernels/types.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

struct LmHeadParams {
    bf16 const* delta;          ///< [T, H] bf16
    bf16 const* residual;       ///< [T, H] bf16
    float const* norm;          ///< [H] f32
    uint8_t const* weight;      ///< panels of [V, H]
    float const* scale;         ///< [1] f32; nullptr in BF16
    int32_t const* logits_rows; ///< [R] i32: rows of delta and residual
    float* logits;              ///< [R, V] f32
    WeightFormat format;
    float eps;
    int hidden;     ///< H
    int rows;       ///< R
    int vocabulary; ///< V
};

/// Rows go 32 at a time, where a block's shared memory holds so many (not on compute capability 12.x), and the rest, if
/// it is up to 8 rows, by a kernel that sums in another order: there a row's bits depend on R.
/// Returns cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchLmHead(LmHeadParams const& params, cudaStream_t stream);

} // namespace flint
