#include "kernels/embedding.h"
#include "trt/ops/ops.h"

namespace flint {

cudaError_t enqueueEmbedding(EnqueueArgs const& args) {
    EmbeddingParams params;
    params.token_ids = args.input<int32_t>("token_ids");
    params.last_tokens = args.input<int32_t>("last_tokens");
    params.table = args.input<void>("table");
    params.out = args.output<void>("out");
    params.tokens = args.symbols[symbol::T];
    params.slots = args.symbols[symbol::Q];
    params.vocabulary = args.symbols[symbol::V];
    params.hidden = args.symbols[symbol::H];
    return launchEmbedding(params, args.stream);
}

} // namespace flint
