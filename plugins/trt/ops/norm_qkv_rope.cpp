#include "kernels/qkv.h"
#include "trt/ops/ops.h"
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

cudaError_t enqueueNormQkvRope(EnqueueArgs const& args) {
    constexpr char const* SHAPES = "hidden size 2048 or 128, head dimension 128";
    if (args.node.intField("head_dim") != kHEAD_DIM) {
        return orRefuse(cudaErrorInvalidValue, SHAPES);
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
    return orRefuse(launchQkv(params, args.stream), SHAPES);
}

size_t normQkvRopeWorkspace(Node const&, Symbols const& symbols) {
    return qkvWorkspaceBytes(symbols[symbol::T], symbols[symbol::H], symbols[symbol::N]);
}

} // namespace flint
