// NormQkvAttention: the decode step's attention from the residual stream on: NormQkvRope and SinkAttention in one.
#pragma once

#include "kernels/attention.h"
#include "kernels/qkv.h"

namespace flint {

/// `qkv.kv` and `attention` name the same cache. The function sets qkv.q, qkv.workspace, attention.q and
/// attention.workspace: all are in `workspace`, of qkvAttentionWorkspaceBytes.
///
/// Steps of up to 16 tokens with as many sequences: the projection, then one kernel that makes q, k and v of its rows
/// and attends. Others: launchQkv and launchSinkAttentionDecode, whose classes of bits hold for all. Returns
/// cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchQkvAttention(QkvParams qkv, SinkAttentionParams attention, void* workspace, cudaStream_t stream);

/// Workspace of steps of up to `tokens` tokens of up to `sequences` sequences, on any GPU.
size_t qkvAttentionWorkspaceBytes(int64_t tokens, int64_t sequences, int64_t hidden, int64_t heads, int64_t kvHeads);

} // namespace flint
