#include "kernels/qkv_attention.h"
#include "trt/ops/attention_params.h"
#include "trt/ops/ops.h"
#include "trt/ops/weights.h"

namespace flint {

cudaError_t enqueueNormQkvAttention(EnqueueArgs const& args) {
    QkvParams const qkv = qkvParams(args);
    SinkAttentionParams const attention = sinkAttentionParams(args, true);
    return orRefuse(launchQkvAttention(qkv, attention, args.stream), kQKV_SHAPES);
}

size_t normQkvAttentionWorkspace(Node const&, Symbols const& symbols) {
    return qkvAttentionWorkspaceBytes(symbols[symbol::T], symbols[symbol::B], symbols[symbol::H], symbols[symbol::Hq],
                                      symbols[symbol::Hkv]);
}

} // namespace flint
