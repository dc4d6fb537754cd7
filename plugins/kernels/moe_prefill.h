// Routed experts of nine tokens and more: choice, tokens sorted by expert, two grouped matrix products, combine with
// the shared expert.
#pragma once

#include "kernels/gemm.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flint {

struct MoePrefillParams {
    WeightFormat format;
    void const* x;              ///< [T, H] bf16, normalised, ordered (gemm_order.cuh)
    float const* logits;        ///< [T, E] f32: the router's
    void const* gate_up;        ///< [E, 2 I / 16, panel] interleaved panels
    float const* gate_up_scale; ///< [E, 2] f32; nullptr for BF16
    void const* down;           ///< [E, H / 16, panel]
    float const* down_scale;    ///< [E] f32; nullptr for BF16
    void const* shared;         ///< [T, H] bf16 plain: the shared expert's output
    void* out;                  ///< [T, H] bf16 plain
    void* workspace;            ///< moePrefillWorkspaceBytes, any content, aligned to 256
    int64_t tokens;             ///< T
    int64_t hidden;             ///< H, a multiple of 64
    int64_t num_experts;        ///< E: 256 or 16
    int64_t intermediate;       ///< I, a multiple of 64
    bool ready;                 ///< whether x and what the first half writes are complete when the kernel launched
                                ///< before the second half calls allowSuccessor()
};

/// Grows with T. Most of it is the experts' outputs: 12 T H bytes.
size_t moePrefillWorkspaceBytes(int64_t tokens, int64_t num_experts, int64_t hidden, int64_t intermediate);

/// First half, from the logits: choice, count, plan, scatter; up to kSPLIT_TOKENS tokens they are one kernel. The sort
/// is stable, so that every buffer has the same bits at every run.
///
/// Both halves return cudaErrorInvalidValue for shapes outside the limits above.
cudaError_t launchMoePrefillRoutes(MoePrefillParams const& params, cudaStream_t stream);

/// Second half: gate_up with SwiGLU, down, combine. A token's result depends on T only through the choice between wgmma
/// and mma.sync.
cudaError_t launchMoePrefillExperts(MoePrefillParams const& params, cudaStream_t stream);

} // namespace flint
