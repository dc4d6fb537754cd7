// The low-latency path of NormMoe.
#pragma once

#include "kernels/moe.h"
#include "kernels/slice.cuh"

namespace flint {

/// Where the low-latency kernels keep what passes between them, inside MoeParams::workspace.
struct MoeDecodeWorkspace {
    float* logits;    ///< [8, E] f32
    bf16* x;          ///< [8, H] bf16, normalised, ordered
    bf16* shared_act; ///< [8, S] bf16, ordered
    bf16* act;        ///< [8, 6, I] bf16, ordered

    static MoeDecodeWorkspace layout(MoeParams const& params) {
        MoeDecodeWorkspace work;
        work.logits = static_cast<float*>(params.workspace);
        work.x = reinterpret_cast<bf16*>(work.logits + kDECODE_TOKENS * params.experts);
        work.shared_act = work.x + kDECODE_TOKENS * params.hidden;
        work.act = work.shared_act + kDECODE_TOKENS * params.shared;
        return work;
    }

    static size_t bytes(int64_t hidden, int64_t experts, int64_t intermediate, int64_t shared) {
        return kDECODE_TOKENS * (experts * sizeof(float) + (hidden + shared + kTOP_K * intermediate) * sizeof(bf16));
    }
};

/// Up to kDECODE_TOKENS tokens.
cudaError_t launchMoeDecode(MoeParams const& params, cudaStream_t stream);

} // namespace flint
