#include "kernels/lm_head.h"
#include "trt/ops/ops.h"
#include "trt/ops/weights.h"

namespace flint {

cudaError_t enqueueLmHead(EnqueueArgs const& args) {
    LmHeadParams params{};
    params.delta = args.input<bf16>("delta");
    params.residual = args.input<bf16>("residual");
    params.norm = args.input<float>("norm");
    params.weight = args.input<uint8_t>("weight");
    params.scale = args.input<float>("weight_scale");
    params.logits_rows = args.input<int32_t>("logits_rows");
    params.logits = args.output<float>("logits");
    params.format = weightFormat(args.node);
    params.eps = args.node.floatField("eps");
    params.hidden = intSymbol(args, symbol::H);
    params.rows = intSymbol(args, symbol::R);
    params.vocabulary = intSymbol(args, symbol::V);
    return orRefuse(launchLmHead(params, args.stream), "hidden size 2048 or 128");
}

} // namespace flint
