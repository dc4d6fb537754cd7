// Routed experts for many tokens: tokens sorted by expert, two grouped matrix products, combine with the shared expert.
#pragma once

#include "kernels/gemm.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flint {

struct MoePrefillParams {
    WeightFormat format;
    void const* x;              ///< [T, H] bf16, normalised, ordered (gemm_order.cuh)
    int32_t const* experts;     ///< [T, 6] i32 in [0, E), best first, all different
    float const* weights;       ///< [T, 6] f32
    void const* gate_up;        ///< [E, 2 I / 16, panel] interleaved panels
    float const* gate_up_scale; ///< [E, 2] f32; nullptr for BF16
    void const* down;           ///< [E, H / 16, panel]
    float const* down_scale;    ///< [E] f32; nullptr for BF16
    void const* shared;         ///< [T, H] bf16 plain: the shared expert's output
    void* out;                  ///< [T, H] bf16 plain
    void* workspace;            ///< moePrefillWorkspaceBytes, any content, aligned to 256
    int64_t tokens;             ///< T
    int64_t hidden;             ///< H, a multiple of 64
    int64_t num_experts;        ///< E, up to 512
    int64_t intermediate;       ///< I, a multiple of 64
};

/// Grows with T. Most of it is the experts' outputs: 12 T H bytes.
size_t moePrefillWorkspaceBytes(int64_t tokens, int64_t num_experts, int64_t hidden, int64_t intermediate);

/// Six kernels: count, plan, scatter, gate_up with SwiGLU, down, combine. The sort is stable, so that every buffer has
/// the same bits at every run; a token's result depends on T only through the choice between wgmma and mma.sync.
/// Returns cudaErrorInvalidValue for shapes outside the limits above.
cudaError_t launchMoePrefill(MoePrefillParams const& params, cudaStream_t stream);

} // namespace flint
