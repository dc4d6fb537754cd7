// Sampling: bias, mask, penalties, temperature, top-k, top-p, min-p, a seeded draw and logprobs per row of logits.
//
// The rules are those of runtime/flint_runtime/executors/reference_sample.py, and the tokens are its tokens, bit for
// bit: probabilities are integers, so no order of summation matters. Two kernels:
//
//   sampleGroupsKernel  a warp reduces 128 logits at a time to their maximum and sum of exponentials, and, in a row
//                       with bias, mask or penalties, to the maximum after those; other rows read none of these.
//   sampleDrawKernel    one block per row finds the groups that can hold the row's best tokens by those maxima, reads
//                       only them, and draws. A row whose filters keep an unknown number of tokens (no top-k, or a
//                       large one) is scanned by its block's whole cluster instead (sample/wide.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flint {

struct SampleParams {
    float const* logits;             ///< [R, V] f32, aligned to 16 bytes
    float const* temperature;        ///< [R] f32; <= 0: greedy
    int32_t const* top_k;            ///< [R] i32; <= 0: off
    float const* top_p;              ///< [R] f32; >= 1: off
    float const* min_p;              ///< [R] f32; <= 0: off
    float const* repetition_penalty; ///< [R] f32; 1: off
    float const* presence_penalty;   ///< [R] f32; 0: off
    float const* frequency_penalty;  ///< [R] f32; 0: off
    int32_t const* seed;             ///< [R, 2] i32, the low word first
    int32_t const* draw_index;       ///< [R] i32
    int32_t const* forced_token;     ///< [R] i32; >= 0: the row's token, which changes no state; -1: draw
    int32_t const* sample_flags;     ///< [R] i32; bit 0: add logit_bias, bit 1: apply token_mask of the row's slot
    int32_t const* sample_slot;      ///< [R] i32; -1: no bias, mask or penalties, nothing recorded
    float const* logit_bias;         ///< [Q, V] f32, aligned to 16 bytes; -inf forbids
    int32_t const* token_mask;       ///< [Q, V / 32] i32; bit v % 32 of word v / 32: token v is allowed
    int32_t* token_counts;           ///< [Q, V] i32, aligned to 16 bytes, updated in place
    int32_t* last_tokens;            ///< [Q] i32, updated in place; of rows that share a slot the last one's token
    int32_t* tokens;                 ///< [R] i32; -1: the row's logits are not finite, or every token is forbidden
    float* logprobs;                 ///< [R] f32
    int32_t* top_tokens;             ///< [R, 20] i32, best first
    float* top_logprobs;             ///< [R, 20] f32
    void* workspace;                 ///< sampleWorkspaceBytes(R, V), aligned to 16 bytes, any content
    int64_t rows;                    ///< R
    int64_t vocabulary;              ///< V, a multiple of 32, 32 to 2^21
    int64_t slots;                   ///< Q
};

/// Bytes of workspace for `rows` rows of `vocabulary` logits; grows with either.
size_t sampleWorkspaceBytes(int64_t rows, int64_t vocabulary);

/// A row whose sample_slot is not below Q, or whose forced_token not below V, draws -1 like one that is not finite: a
/// wrong index must not read out of bounds, nor pass unseen. Results do not depend on the other rows. Returns
/// cudaErrorInvalidValue for a V that is not as stated.
cudaError_t launchSample(SampleParams const& params, cudaStream_t stream);

} // namespace flint
