// What the ops of attention share: a node's bindings as the launchers' params.
#pragma once

#include "kernels/attention.h"
#include "kernels/qkv.h"
#include "trt/enqueue.h"

namespace flint {

/// What launchQkv has instances for; see orRefuse.
constexpr char const* kQKV_SHAPES = "hidden size 2048 or 128, head dimension 128";

/// The projection of NormQkvRope and NormQkvAttention; q is nullptr where it is no output. Throws std::invalid_argument
/// for another head dimension.
QkvParams qkvParams(EnqueueArgs const& args);

/// The attention of SinkAttention and NormQkvAttention; q is nullptr where it is no input. Throws std::invalid_argument
/// where the kernels cannot do it.
SinkAttentionParams sinkAttentionParams(EnqueueArgs const& args, bool decode);

} // namespace flint
