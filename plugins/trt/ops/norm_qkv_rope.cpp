#include "trt/ops/attention_params.h"
#include "trt/ops/ops.h"
#include "trt/ops/weights.h"

namespace flint {

cudaError_t enqueueNormQkvRope(EnqueueArgs const& args) {
    return orRefuse(launchQkv(qkvParams(args), args.stream), kQKV_SHAPES);
}

size_t normQkvRopeWorkspace(Node const&, Symbols const& symbols) {
    return qkvWorkspaceBytes(symbols[symbol::T], symbols[symbol::H], symbols[symbol::N]);
}

} // namespace flint
