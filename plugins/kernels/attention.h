// Causal attention with one learned sink logit per query head, over a paged pool (full layers) or a ring (sliding
// ones).
//
// Formula, accumulators and rounding: shared rules of SinkAttention (reference_attention.py). For a query at position p
// and every visible key k, l_k = FP32(q . k) * 128^-0.5;  out = r(sum r(p_k) v_k / (sum p_k + exp(sink - m))) with
// p_k = exp(l_k - m), everything FP32 but the P operand of P.V, which is rounded to BF16. m is a running maximum, so P
// is rounded at another power of two than with the final maximum: the same relative error. exp(x) is computed as
// ex2.approx(x * log2 e), relative error 2^-22, the factor folded into 128^-0.5.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flint {

struct SinkAttentionParams {
    void const* q;              ///< [T, Hq, 128] bf16, aligned to 16 bytes like every BF16 tensor here
    float const* sinks;         ///< [Hq] f32
    int32_t const* query_start; ///< [B + 1] i32; rows from query_start[B] on are padding and become zeros
    int32_t const* seq_lens;    ///< [B] i32, length after the step; may be 0 where a sequence has no rows
    int32_t const* page_table;  ///< [B, P] i32; full layers only. Entries behind a sequence's last page are not read
    int32_t const* ring_slot;   ///< [B] i32; sliding layers only
    void const* kv_pool;        ///< full: [pages, Hkv, 2, 64, 128] bf16; sliding: [slots, Hkv, 2, ring, 128] bf16
    void* kv_pool_out;          ///< sliding prefill: the same memory as kv_pool; else unused
    void const* fresh_kv;       ///< [T, 2, Hkv, 128] bf16, sliding prefill: K and V of this step's tokens; else unused
    void* out;                  ///< [T, Hq * 128] bf16
    void* workspace;            ///< as many bytes as the functions below say, with any content, aligned to 256
    int64_t tokens;             ///< T
    int64_t sequences;          ///< B
    int64_t table_width;        ///< P; 0 in sliding layers
    int64_t heads;              ///< Hq, 8 * Hkv
    int64_t kv_heads;           ///< Hkv
    int64_t head_dim;           ///< 128
    int64_t ring;               ///< tokens of a ring, position p standing at p % ring; 0 in full layers
    int64_t window;             ///< keys that a query sees, itself included; 0 in full layers: all
};

/// What the kernels cannot do with these shapes, or nullptr. The launchers return cudaErrorInvalidValue in that case.
char const* sinkAttentionProblem(SinkAttentionParams const& params, bool decode);

/// Workspace of a decode launch of up to `tokens` rows of up to `sequences` sequences, on any GPU.
size_t sinkAttentionDecodeWorkspaceBytes(int64_t tokens, int64_t sequences, int64_t heads, int64_t kvHeads);

/// Workspace of a full layer's prefill launch of up to `tokens` rows, on any GPU; at most 51 MB. Sliding layers need
/// none.
size_t sinkAttentionPrefillWorkspaceBytes(int64_t tokens, int64_t heads, int64_t kvHeads);

/// At most 8 tokens a sequence, whose K and V already stand in kv_pool. One kernel, dependent launch.
///
/// How a sequence is split over blocks and warps depends on its length, its number of new tokens, the GPU, and, in full
/// layers and wide windows, on whether the step has more than 16 tokens. Full layers, and windows of up to 561 keys,
/// have one class of steps more: up to 16 tokens, as many as there are sequences. Within a class a sequence's bits do
/// not depend on the rest of the batch.
///
/// Old tokens' K and V, and the step's metadata, are read before the predecessor's end: whoever wrote them must come
/// before the step's first kernel, and that kernel must be launched without overlap (Embedding is).
cudaError_t launchSinkAttentionDecode(SinkAttentionParams const& params, cudaStream_t stream);

/// Any number of tokens a sequence. Full layers: K and V already stand in kv_pool. Sliding layers: the step's own are
/// in fresh_kv, and the last min(new, ring) of each sequence are written to kv_pool_out by a second kernel.
///
/// Full layers split the keys of 16 tokens over at most S blocks where the step has few tokens, and merge the splits in
/// a second kernel. S = 768 / (Hkv n), rounded down, at most 128, and 1 where it would be less than 4; n = (T + 15
/// min(T, B)) / 16, rounded down, is the greatest number of groups of 16. With Hkv = 4 and one sequence S is 128 up to
/// T = 16, 27 at T = 100, 12 at 256, 4 up to 768, then 1. A split has 8 tiles of 64 keys or more. Within the steps of
/// an S a sequence's bits depend on nothing but its own tokens and length; with S = 1, and up to 960 keys, they are
/// those of no split.
cudaError_t launchSinkAttentionPrefill(SinkAttentionParams const& params, cudaStream_t stream);

} // namespace flint
