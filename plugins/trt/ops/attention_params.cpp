#include "trt/ops/attention_params.h"

#include "trt/ops/weights.h"

namespace flint {

namespace {

KvTarget kvTarget(EnqueueArgs const& args) {
    KvTarget target{};
    target.kv_heads = intSymbol(args, symbol::Hkv);
    if (auto* const fresh = args.output<bf16>("fresh_kv")) {
        target.kind = KvTarget::Kind::kFRESH;
        target.base = fresh;
        return target;
    }
    target.base = args.output<bf16>("kv_pool_out");
    target.query_start = args.input<int32_t>("query_start");
    target.sequences = intSymbol(args, symbol::B1) - 1;
    if (args.node.strField("attention") == "full") {
        target.kind = KvTarget::Kind::kPAGES;
        target.page_table = args.input<int32_t>("page_table");
        target.table_width = intSymbol(args, symbol::P);
    } else {
        target.kind = KvTarget::Kind::kRING;
        target.ring_slot = args.input<int32_t>("ring_slot");
        target.ring = intSymbol(args, symbol::W);
    }
    return target;
}

} // namespace

QkvParams qkvParams(EnqueueArgs const& args) {
    if (args.node.intField("head_dim") != kHEAD_DIM) {
        orRefuse(cudaErrorInvalidValue, kQKV_SHAPES);
    }
    QkvParams params{};
    params.delta = args.input<bf16>("delta");
    params.residual = args.input<bf16>("residual");
    params.norm = args.input<float>("norm");
    params.weight = args.input<uint8_t>("qkv");
    params.scale = args.input<float>("qkv_scale");
    params.q_norm = args.input<float>("q_norm");
    params.k_norm = args.input<float>("k_norm");
    params.rope = args.input<float>("rope");
    params.positions = args.input<int32_t>("positions");
    params.q = args.output<bf16>("q");
    params.residual_out = args.output<bf16>("residual_out");
    params.kv = kvTarget(args);
    params.workspace = args.workspace;
    params.format = weightFormat(args.node);
    params.eps = args.node.floatField("eps");
    params.tokens = intSymbol(args, symbol::T);
    params.hidden = intSymbol(args, symbol::H);
    params.heads = intSymbol(args, symbol::Hq);
    params.kv_heads = intSymbol(args, symbol::Hkv);
    return params;
}

SinkAttentionParams sinkAttentionParams(EnqueueArgs const& args, bool decode) {
    bool const full = args.node.strField("attention") == "full";
    Symbols const& symbols = args.symbols;
    SinkAttentionParams params{};
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
        throw std::invalid_argument(std::string(problem) + ". Found " + std::to_string(params.heads) +
                                    " query heads, " + std::to_string(params.kv_heads) + " KV heads, head dimension " +
                                    std::to_string(params.head_dim) + ", window " + std::to_string(params.window) +
                                    ", ring " + std::to_string(params.ring) + ", " + std::to_string(params.tokens) +
                                    " tokens, " + std::to_string(params.sequences) + " sequences");
    }
    return params;
}

} // namespace flint
