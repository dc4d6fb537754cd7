#include "kernels/attention.h"
#include "trt/log.h"
#include "trt/ops/ops.h"

namespace flint {

cudaError_t enqueueSinkAttention(EnqueueArgs const& args) {
    bool const full = args.node.strField("attention") == "full";
    bool const decode = args.node.strField("phase") == "decode";
    Symbols const& symbols = args.symbols;
    SinkAttentionParams params;
    params.q = args.input<void>("q");
    params.sinks = args.input<float>("sinks");
    params.query_start = args.input<int32_t>("query_start");
    params.seq_lens = args.input<int32_t>("seq_lens");
    params.page_table = args.input<int32_t>("page_table");
    params.ring_slot = args.input<int32_t>("ring_slot");
    params.kv_pool = args.input<void>("kv_pool");
    params.kv_pool_out = args.output<void>("kv_pool_out");
    params.fresh_kv = args.input<void>("fresh_kv");
    params.out = args.output<void>("out");
    params.workspace = args.workspace;
    params.tokens = symbols[symbol::T];
    params.sequences = symbols[symbol::B];
    params.table_width = full ? symbols[symbol::P] : 0;
    params.heads = symbols[symbol::Hq];
    params.kv_heads = symbols[symbol::Hkv];
    params.head_dim = symbols[symbol::D];
    params.ring = full ? 0 : symbols[symbol::W];
    params.window = args.node.intField("window");
    if (char const* const problem = sinkAttentionProblem(params, decode)) {
        logError(std::string("SinkAttention: ") + problem + ". Found " + std::to_string(params.heads) +
                 " query heads, " + std::to_string(params.kv_heads) + " KV heads, head dimension " +
                 std::to_string(params.head_dim) + ", window " + std::to_string(params.window) + ", ring " +
                 std::to_string(params.ring) + ", " + std::to_string(params.tokens) + " tokens, " +
                 std::to_string(params.sequences) + " sequences");
        return cudaErrorInvalidValue;
    }
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
