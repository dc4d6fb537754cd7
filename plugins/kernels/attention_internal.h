// What the kernels of decode attention know of each other.
#pragma once

#include "kernels/attention.h"
#include "kernels/types.h"

namespace flint::attention {

/// Steps of up to so many rows go for latency.
constexpr int kLATENCY_TOKENS = 16;

/// q, k and v of a step's tokens as the projection leaves them, and what makes of them what attention reads.
struct NewTokens {
    bf16 const* raw;     ///< [T, (Hq + 2 Hkv) 128] bf16: q heads, k, v
    float const* q_norm; ///< [128] f32
    float const* k_norm; ///< [128] f32
    float const* rope;   ///< [C, 128] f32: cos | sin; nullptr: no RoPE
    float eps;
};

/// Whether launchRowAttention takes a step: one of few tokens, as many as sequences.
bool isRowStep(SinkAttentionParams const& params);

/// Workspace of launchRowAttention for up to `tokens` rows.
size_t rowAttentionWorkspaceBytes(int64_t tokens, int64_t heads);

/// launchSinkAttentionDecode for such a step. With `news` q is not read, and the step's keys are not yet in kv_pool:
/// the kernel puts them there.
cudaError_t launchRowAttention(SinkAttentionParams const& params, NewTokens const* news, cudaStream_t stream);

} // namespace flint::attention
