// NormQkvAttention: which kernels make a step.
#include "kernels/qkv_attention.h"

#include "kernels/attention_internal.h"

namespace flint {

namespace {

constexpr size_t aligned(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

size_t projectBytes(int64_t tokens, int64_t hidden, int64_t heads, int64_t kvHeads) {
    return aligned(qkvWorkspaceBytes(tokens, hidden, (heads + 2 * kvHeads) * kHEAD_DIM));
}

} // namespace

size_t qkvAttentionWorkspaceBytes(int64_t tokens, int64_t sequences, int64_t hidden, int64_t heads, int64_t kvHeads) {
    return projectBytes(tokens, hidden, heads, kvHeads) + aligned(tokens * heads * kHEAD_DIM * sizeof(bf16)) +
           sinkAttentionDecodeWorkspaceBytes(tokens, sequences, heads, kvHeads);
}

cudaError_t launchQkvAttention(QkvParams const& qkvParams, SinkAttentionParams const& attentionParams,
                               cudaStream_t stream) {
    QkvParams qkv = qkvParams;
    SinkAttentionParams attention = attentionParams;
    if (sinkAttentionProblem(attention, true)) {
        return cudaErrorInvalidValue;
    }
    auto* const q =
        static_cast<uint8_t*>(qkv.workspace) + projectBytes(qkv.tokens, qkv.hidden, qkv.heads, qkv.kv_heads);
    qkv.q = reinterpret_cast<bf16*>(q);
    attention.q = q;
    attention.workspace = q + aligned(int64_t{qkv.tokens} * qkv.heads * kHEAD_DIM * sizeof(bf16));
    if (qkv.tokens > 0 && attention::isRowStep(attention)) {
        if (cudaError_t const error = launchQkvProject(qkv, stream); error != cudaSuccess) {
            return error;
        }
        attention::NewTokens const news{static_cast<bf16 const*>(qkv.workspace), qkv.q_norm, qkv.k_norm, qkv.rope,
                                        qkv.eps};
        return attention::launchRowAttention(attention, &news, stream);
    }
    if (cudaError_t const error = launchQkv(qkv, stream); error != cudaSuccess) {
        return error;
    }
    return launchSinkAttentionDecode(attention, stream);
}

} // namespace flint
