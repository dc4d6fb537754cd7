#include "kernels/linear.h"
#include "trt/ops/ops.h"
#include "trt/ops/weights.h"

namespace flint {

cudaError_t enqueueLinear(EnqueueArgs const& args) {
    LinearParams params{};
    params.x = args.input<bf16>("x");
    params.weight = args.input<uint8_t>("weight");
    params.scale = args.input<float>("weight_scale");
    params.y = args.output<bf16>("y");
    params.workspace = args.workspace;
    params.format = weightFormat(args.node);
    params.ordered = false;
    params.tokens = intSymbol(args, symbol::T);
    params.columns = intSymbol(args, symbol::K);
    params.rows = intSymbol(args, symbol::N);
    return launchLinear(params, args.stream);
}

size_t linearWorkspace(Node const&, Symbols const& symbols) {
    return linearWorkspaceBytes(symbols[symbol::T], symbols[symbol::K]);
}

} // namespace flint
