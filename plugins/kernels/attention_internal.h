// What the two kernels of decode attention know of each other.
#pragma once

#include "kernels/attention.h"

namespace flint::attention {

/// Steps of up to so many rows go for latency.
constexpr int kLATENCY_TOKENS = 16;

/// Whether launchWindowDecode takes a step: one of few tokens, one a sequence, in rings.
bool isWindowStep(SinkAttentionParams const& params);

/// launchSinkAttentionDecode for such a step; uses no workspace.
cudaError_t launchWindowDecode(SinkAttentionParams const& params, cudaStream_t stream);

} // namespace flint::attention
