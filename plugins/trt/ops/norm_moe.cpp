#include "kernels/moe.h"
#include "trt/ops/ops.h"
#include "trt/ops/weights.h"

namespace flint {

cudaError_t enqueueNormMoe(EnqueueArgs const& args) {
    constexpr char const* SHAPES = "hidden 2048, 256 or 16 experts of 512, shared expert 1024; hidden 128, 16 experts "
                                   "of 64, shared expert 64; top-6";
    if (args.node.intField("top_k") != kTOP_K) {
        return orRefuse(cudaErrorInvalidValue, SHAPES);
    }
    MoeParams params{};
    params.delta = args.input<bf16>("delta");
    params.residual = args.input<bf16>("residual");
    params.norm = args.input<float>("norm");
    params.router = args.input<void>("router");
    params.up = args.input<uint8_t>("experts_gate_up");
    params.up_scale = args.input<float>("experts_gate_up_scale");
    params.down = args.input<uint8_t>("experts_down");
    params.down_scale = args.input<float>("experts_down_scale");
    params.shared_up = args.input<uint8_t>("shared_gate_up");
    params.shared_up_scale = args.input<float>("shared_gate_up_scale");
    params.shared_down = args.input<uint8_t>("shared_down");
    params.shared_down_scale = args.input<float>("shared_down_scale");
    params.out = args.output<bf16>("out");
    params.residual_out = args.output<bf16>("residual_out");
    params.workspace = args.workspace;
    params.format = weightFormat(args.node);
    params.router_f32 = args.inputIs("router", DType::kF32);
    params.eps = args.node.floatField("eps");
    params.tokens = intSymbol(args, symbol::T);
    params.hidden = intSymbol(args, symbol::H);
    params.experts = intSymbol(args, symbol::E);
    params.intermediate = intSymbol(args, symbol::I);
    params.shared = intSymbol(args, symbol::S);
    return orRefuse(launchMoe(params, args.stream), SHAPES);
}

size_t normMoeWorkspace(Node const&, Symbols const& symbols) {
    return moeWorkspaceBytes(symbols[symbol::T], symbols[symbol::H], symbols[symbol::E], symbols[symbol::I],
                             symbols[symbol::S]);
}

} // namespace flint
