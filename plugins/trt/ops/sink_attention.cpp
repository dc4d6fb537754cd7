#include "trt/ops/attention_params.h"
#include "trt/ops/ops.h"

namespace flint {

cudaError_t enqueueSinkAttention(EnqueueArgs const& args) {
    bool const decode = args.node.strField("phase") == "decode";
    SinkAttentionParams const params = sinkAttentionParams(args, decode);
    return decode ? launchSinkAttentionDecode(params, args.stream) : launchSinkAttentionPrefill(params, args.stream);
}

size_t sinkAttentionWorkspace(Node const& node, Symbols const& symbols) {
    int64_t const tokens = symbols[symbol::T], heads = symbols[symbol::Hq], kvHeads = symbols[symbol::Hkv];
    if (node.strField("phase") == "decode") {
        return sinkAttentionDecodeWorkspaceBytes(tokens, symbols[symbol::B], heads, kvHeads);
    }
    return node.strField("attention") == "full" ? sinkAttentionPrefillWorkspaceBytes(tokens, heads, kvHeads) : 0;
}

} // namespace flint
