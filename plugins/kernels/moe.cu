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
    work.routed = carver.base + carver.used;
    return work;
}

/// Whether the kernels of this step overlap, see launchMoe.
bool overlaps(MoeParams const& params) {
    return dividesColumns(params.tokens, 2 * int64_t{params.shared}) && dividesColumns(params.tokens, params.hidden);
}

/// The shared expert's products; for `x_ready` see launchMoe.
GemmParams sharedUp(MoeParams const& params, Workspace const& work) {
    GemmParams up{params.format,    GemmEpilogue::kSwiGlu,      work.x,
                  params.shared_up, params.shared_up_scale,     work.shared_act,
                  params.tokens,    2 * int64_t{params.shared}, params.hidden};
    up.x_ready = overlaps(params);
    return up;
}

GemmParams sharedDown(MoeParams const& params, Workspace const& work) {
    GemmParams down{
        params.format,   GemmEpilogue::kStore, work.shared_act, params.shared_down, params.shared_down_scale,
        work.shared_out, params.tokens,        params.hidden,   params.shared};
    down.x_ready = overlaps(params);
    return down;
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
    RouterParams const router{work.x,        params.router, work.logits,   params.router_f32,
                              params.tokens, params.hidden, params.experts};
    MoePrefillParams routed{};
    routed.format = params.format;
    routed.x = work.x;
    routed.logits = work.logits;
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
    routed.ready = overlaps(params);
    // Up to some hundred tokens each of these takes its latency and little more, so they overlap: a product whose
    // inputs were complete when it was allowed to start runs beside the kernel before it, and waits for that one at its
    // end. So do shared up with the router's logits, shared down with the choice, and the experts' first with shared
    // down.
    cudaError_t error = launchNormRows(norm, params.hidden, RowOrder::kPREFILL, work.x, stream);
    if (error == cudaSuccess) {
        error = launchRouterLogits(router, stream);
    }
    if (error == cudaSuccess) {
        error = launchGemm(sharedUp(params, work), stream); // reads x
    }
    if (error == cudaSuccess) {
        error = launchMoePrefillRoutes(routed, stream); // reads the logits
    }
    if (error == cudaSuccess) {
        error = launchGemm(sharedDown(params, work), stream); // reads what its first half wrote
    }
    return error != cudaSuccess ? error : launchMoePrefillExperts(routed, stream); // reads x and the routes
}

} // namespace flint
