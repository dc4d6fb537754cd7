// NormQkvAttention: the projection leaves q in the workspace, where attention reads it.
#include "kernels/qkv_attention.h"

#include <algorithm>

namespace flint {

namespace {

/// Of q, which stands first in the workspace; attention's own part must be aligned to 256.
size_t qBytes(int64_t tokens, int64_t heads) {
    size_t const bytes = static_cast<size_t>(tokens * heads) * kHEAD_DIM * sizeof(bf16);
    return (bytes + 255) / 256 * 256;
}

} // namespace

size_t qkvAttentionWorkspaceBytes(int64_t tokens, int64_t sequences, int64_t hidden, int64_t heads, int64_t kvHeads) {
    // One part follows the other on a stream, and neither asks what is in its workspace.
    size_t const parts = std::max(qkvWorkspaceBytes(tokens, hidden, (heads + 2 * kvHeads) * kHEAD_DIM),
                                  sinkAttentionDecodeWorkspaceBytes(tokens, sequences, heads, kvHeads));
    return qBytes(tokens, heads) + parts;
}

cudaError_t launchQkvAttention(QkvParams const& qkv, SinkAttentionParams const& attention, cudaStream_t stream) {
    auto* const workspace = static_cast<uint8_t*>(qkv.workspace);
    QkvParams projection = qkv;
    SinkAttentionParams core = attention;
    projection.q = reinterpret_cast<bf16*>(workspace);
    core.q = workspace;
    projection.workspace = core.workspace = workspace + qBytes(qkv.tokens, qkv.heads);
    if (cudaError_t const status = launchQkv(projection, stream); status != cudaSuccess) {
        return status;
    }
    return launchSinkAttentionDecode(core, stream);
}

} // namespace flint
