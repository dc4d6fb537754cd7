// The router of nine tokens and more: FP32 logits, then each token's choice.
#pragma once

#include "kernels/types.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

struct RouterParams {
    bf16 const* x;      ///< [T, H] bf16, each 64 columns in gemmOrder
    void const* weight; ///< [E, H] bf16 or f32
    float* logits;      ///< [T, E] f32
    bool f32;           ///< type of `weight`
    int tokens;         ///< T
    int hidden;         ///< H, a multiple of 64; at most 2,048 with up to kSPLIT_TOKENS (gemm.h) tokens
    int experts;        ///< E, a multiple of 16
};

/// A logit has the same bits whatever the number of tokens. x is complete when the kernel calls allowSuccessor().
/// Returns cudaErrorInvalidValue for a shape outside the limits above.
cudaError_t launchRouterLogits(RouterParams const& params, cudaStream_t stream);

struct RouterChoiceParams {
    float const* logits; ///< [T, E] f32
    int32_t* experts;    ///< [T, 6] i32, by descending logit
    float* weights;      ///< [T, 6] f32, summing to 1
    int tokens;          ///< T
    int experts_count;   ///< E: 256 or 16
};

/// Returns cudaErrorInvalidValue for a number of experts that has no instance.
cudaError_t launchRouterChoice(RouterChoiceParams const& params, cudaStream_t stream);

} // namespace flint
