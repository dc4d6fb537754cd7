// NormMoe for any number of tokens: the low-latency path for a few, else norm, router, shared expert, routed experts.
#include "kernels/moe.h"

#include "kernels/gemm.h"
#include "kernels/moe_internal.h"
#include "kernels/moe_prefill.h"
#include "kernels/norm_rows.h"
#include "kernels/router.h"

#include <algorithm>

namespace flint {

namespace {

/// What passes between the kernels of the many-tokens path, inside MoeParams::workspace.
struct Workspace {
    bf16* x;          ///< [T, H], normalised, in gemmOrder
    bf16* shared_act; ///< [T, S], in gemmOrder
    bf16* shared_out; ///< [T, H]
    float* logits;    ///< [T, E]
    int32_t* experts; ///< [T, 6]
    float* weights;   ///< [T, 6]
    void* routed;     ///< moePrefillWorkspaceBytes
};

/// Hands out aligned pieces of a workspace; with a null base it only counts.
struct Carver {
    uint8_t* base;
    size_t used = 0;

    template <typename T>
    T* take(int64_t count) {
        uint8_t* const piece = base + used;
        used += (count * sizeof(T) + 255) / 256 * 256;
        return reinterpret_cast<T*>(piece);
    }
};

Workspace carve(Carver& carver, int64_t tokens, int64_t hidden, int64_t experts, int64_t shared) {
    Workspace work;
    work.x = carver.take<bf16>(tokens * hidden);
    work.shared_act = carver.take<bf16>(tokens * shared);
    work.shared_out = carver.take<bf16>(tokens * hidden);
    work.logits = carver.take<float>(tokens * experts);
    work.experts = carver.take<int32_t>(tokens * kTOP_K);
    work.weights = carver.take<float>(tokens * kTOP_K);
    work.routed = carver.base + carver.used;
    return work;
}

cudaError_t launchShared(MoeParams const& params, Workspace const& work, cudaStream_t stream) {
    GemmParams const up{params.format,    GemmEpilogue::kSwiGlu,      work.x,
                        params.shared_up, params.shared_up_scale,     work.shared_act,
                        params.tokens,    2 * int64_t{params.shared}, params.hidden};
    if (cudaError_t const error = launchGemm(up, stream); error != cudaSuccess) {
        return error;
    }
    GemmParams const down{
        params.format,   GemmEpilogue::kStore, work.shared_act, params.shared_down, params.shared_down_scale,
        work.shared_out, params.tokens,        params.hidden,   params.shared};
    return launchGemm(down, stream);
}

} // namespace

size_t moeWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t experts, int64_t intermediate, int64_t shared) {
    size_t const few = MoeDecodeWorkspace::bytes(hidden, experts, intermediate, shared);
    if (tokens <= kDECODE_TOKENS) {
        return few;
    }
    Carver carver{nullptr};
    carve(carver, tokens, hidden, experts, shared);
    return std::max(few, carver.used + moePrefillWorkspaceBytes(tokens, experts, hidden, intermediate));
}

cudaError_t launchMoe(MoeParams const& params, cudaStream_t stream) {
    if (params.tokens <= kDECODE_TOKENS) {
        return launchMoeDecode(params, stream);
    }
    Carver carver{static_cast<uint8_t*>(params.workspace)};
    Workspace const work = carve(carver, params.tokens, params.hidden, params.experts, params.shared);
    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    if (cudaError_t const error = launchNormRows(norm, params.hidden, RowOrder::kPREFILL, work.x, stream);
        error != cudaSuccess) {
        return error;
    }
    RouterParams const router{work.x,        params.router, work.logits,
                              work.experts,  work.weights,  params.router_f32,
                              params.tokens, params.hidden, params.experts};
    if (cudaError_t const error = launchRouter(router, stream); error != cudaSuccess) {
        return error;
    }
    if (cudaError_t const error = launchShared(params, work, stream); error != cudaSuccess) {
        return error;
    }
    MoePrefillParams routed{};
    routed.format = params.format;
    routed.x = work.x;
    routed.experts = work.experts;
    routed.weights = work.weights;
    routed.gate_up = params.up;
    routed.gate_up_scale = params.up_scale;
    routed.down = params.down;
    routed.down_scale = params.down_scale;
    routed.shared = work.shared_out;
    routed.out = params.out;
    routed.workspace = work.routed;
    routed.tokens = params.tokens;
    routed.hidden = params.hidden;
    routed.num_experts = params.experts;
    routed.intermediate = params.intermediate;
    return launchMoePrefill(routed, stream);
}

} // namespace flint
