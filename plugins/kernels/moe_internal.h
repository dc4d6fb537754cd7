// The low-latency path of NormMoe.
#pragma once

#include "kernels/moe.h"
#include "kernels/routing.cuh"
#include "kernels/slice.cuh"

namespace flint {

constexpr int kDECODE_PAIRS = kDECODE_TOKENS * kTOP_K; ///< (token, slot) pairs

/// Up to so many tokens the kernels of one token take each by itself: they rarely share an expert then, and a panel's
/// weights come from the L2 the second time.
constexpr int kSINGLE_TOKENS = 2;

/// Where the low-latency kernels keep what passes between them, inside MoeParams::workspace.
struct MoeDecodeWorkspace {
    StepRoutes<kDECODE_TOKENS>* routes; ///< of more than kSINGLE_TOKENS; else every block routes
    float* logits;                      ///< [8, E] f32
    bf16* x;                            ///< [8, H] bf16, normalised, ordered
    bf16* shared_act;                   ///< [8, S] bf16, ordered
    bf16* act;                          ///< [8, 6, I] bf16, ordered

    static MoeDecodeWorkspace layout(MoeParams const& params) {
        MoeDecodeWorkspace work;
        work.routes = static_cast<StepRoutes<kDECODE_TOKENS>*>(params.workspace);
        work.logits = reinterpret_cast<float*>(static_cast<uint8_t*>(params.workspace) + kROUTES_BYTES);
        work.x = reinterpret_cast<bf16*>(work.logits + kDECODE_TOKENS * params.experts);
        work.shared_act = work.x + kDECODE_TOKENS * params.hidden;
        work.act = work.shared_act + kDECODE_TOKENS * params.shared;
        return work;
    }

    /// The part of a token.
    __host__ __device__ MoeDecodeWorkspace of(int token, MoeParams const& params) const {
        MoeDecodeWorkspace its = *this;
        its.logits += int64_t{token} * params.experts;
        its.x += int64_t{token} * params.hidden;
        its.shared_act += int64_t{token} * params.shared;
        its.act += int64_t{token} * kTOP_K * params.intermediate;
        return its;
    }

    static size_t bytes(int64_t hidden, int64_t experts, int64_t intermediate, int64_t shared) {
        return kROUTES_BYTES +
               kDECODE_TOKENS * (experts * sizeof(float) + (hidden + shared + kTOP_K * intermediate) * sizeof(bf16));
    }

  private:
    static constexpr size_t kROUTES_BYTES = (sizeof(StepRoutes<kDECODE_TOKENS>) + 255) / 256 * 256;
};

/// Up to kDECODE_TOKENS tokens.
cudaError_t launchMoeDecode(MoeParams const& params, cudaStream_t stream);

/// The kernels of up to kSINGLE_TOKENS tokens, each by itself, and of more together; MoeParams::tokens tells which.
cudaError_t launchMoeRoute(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream);
cudaError_t launchMoeExperts(MoeParams const& params, MoeDecodeWorkspace const& work, cudaStream_t stream);

} // namespace flint
