#include "kernels/mlp.h"
#include "trt/ops/ops.h"
#include "trt/ops/weights.h"

namespace flint {

cudaError_t enqueueNormMlp(EnqueueArgs const& args) {
    MlpParams params{};
    params.delta = args.input<bf16>("delta");
    params.residual = args.input<bf16>("residual");
    params.norm = args.input<float>("norm");
    params.gate_up = args.input<uint8_t>("gate_up");
    params.gate_up_scale = args.input<float>("gate_up_scale");
    params.down = args.input<uint8_t>("down");
    params.down_scale = args.input<float>("down_scale");
    params.out = args.output<bf16>("out");
    params.residual_out = args.output<bf16>("residual_out");
    params.workspace = args.workspace;
    params.format = weightFormat(args.node);
    params.eps = args.node.floatField("eps");
    params.tokens = intSymbol(args, symbol::T);
    params.hidden = intSymbol(args, symbol::H);
    params.intermediate = intSymbol(args, symbol::I);
    return orRefuse(launchMlp(params, args.stream), "hidden size 2048 or 128, intermediate size 6144 or 256");
}

size_t normMlpWorkspace(Node const&, Symbols const& symbols) {
    return mlpWorkspaceBytes(symbols[symbol::T], symbols[symbol::H], symbols[symbol::I]);
}

} // namespace flint
