// NormQkvAttention: what stands in a decode step's layer before the output projection, in one: NormQkvRope (qkv.h) and
// SinkAttention (attention.h), whose decode forms are its parts.
#pragma once

#include "kernels/attention.h"
#include "kernels/qkv.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flint {

/// Workspace of a launch of up to `tokens` rows of up to `sequences` sequences, on any GPU.
size_t qkvAttentionWorkspaceBytes(int64_t tokens, int64_t sequences, int64_t hidden, int64_t heads, int64_t kvHeads);

/// Write the step's K and V to qkv.kv, pages or rings, and attend: attention.out, and qkv.residual_out where the layer
/// has a residual.
///
/// Both structs describe the same step: tokens, heads, kv_heads, query_start, the page table or the ring slots, and
/// attention.kv_pool, which is qkv.kv.base; a token's position is its place in its sequence, which seq_lens ends.
/// `qkv.workspace` is the whole op's (qkvAttentionWorkspaceBytes, any content, aligned to 256). qkv.q, attention.q and
/// attention.workspace point into it and are set here. kv_pool_out and fresh_kv are unused.
///
/// Steps of up to 16 tokens with as many sequences: the projection, and one kernel that makes q, k and v of its rows
/// and attends. Others: the two parts. What launchSinkAttentionDecode says of old tokens' K and V, the step's metadata
/// and bits holds for all of them. Returns cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchQkvAttention(QkvParams const& qkv, SinkAttentionParams const& attention, cudaStream_t stream);

} // namespace flint
