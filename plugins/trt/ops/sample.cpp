#include "kernels/sample.h"
#include "trt/ops/ops.h"

namespace flint {

cudaError_t enqueueSample(EnqueueArgs const& args) {
    SampleParams params;
    params.logits = args.input<float>("logits");
    params.temperature = args.input<float>("temperature");
    params.top_k = args.input<int32_t>("top_k");
    params.top_p = args.input<float>("top_p");
    params.min_p = args.input<float>("min_p");
    params.repetition_penalty = args.input<float>("repetition_penalty");
    params.presence_penalty = args.input<float>("presence_penalty");
    params.frequency_penalty = args.input<float>("frequency_penalty");
    params.seed = args.input<int32_t>("seed");
    params.draw_index = args.input<int32_t>("draw_index");
    params.forced_token = args.input<int32_t>("forced_token");
    params.sample_flags = args.input<int32_t>("sample_flags");
    params.sample_slot = args.input<int32_t>("sample_slot");
    params.logit_bias = args.input<float>("logit_bias");
    params.token_mask = args.input<int32_t>("token_mask");
    // The memory of the inputs token_counts and last_tokens.
    params.token_counts = args.output<int32_t>("token_counts_out");
    params.last_tokens = args.output<int32_t>("last_tokens_out");
    params.tokens = args.output<int32_t>("tokens");
    params.logprobs = args.output<float>("logprobs");
    params.top_tokens = args.output<int32_t>("top_tokens");
    params.top_logprobs = args.output<float>("top_logprobs");
    params.workspace = args.workspace;
    params.rows = args.symbols[symbol::R];
    params.vocabulary = args.symbols[symbol::V];
    params.slots = args.symbols[symbol::Q];
    return launchSample(params, args.stream);
}

size_t sampleWorkspace(Node const&, Symbols const& symbols) {
    return sampleWorkspaceBytes(symbols[symbol::R], symbols[symbol::V]);
}

} // namespace flint
