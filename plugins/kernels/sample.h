// Sampling: penalties, temperature, top-k, top-p, min-p, a seeded draw and logprobs per row of logits.
//
// The rules are those of runtime/flint_runtime/executors/reference_sample.py, and the tokens are its tokens, bit for
// bit: probabilities are integers, so no order of summation matters. Two kernels:
//
//   sampleGroupsKernel  one warp per 128 logits: their maximum, sum of exponentials and penalised maximum.
//   sampleDrawKernel    one block per row finds the groups that can hold the row's best tokens by those maxima, reads
//                       only them, and draws. A row whose filters keep an unknown number of tokens (no top-k, or a
//                       large one) is scanned by its block's whole cluster instead (sample/wide.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flint {

struct SampleParams {
    float const* logits;             ///< [R, V] f32
    float const* temperature;        ///< [R] f32; <= 0: greedy
    int32_t const* top_k;            ///< [R] i32; <= 0: off
    float const* top_p;              ///< [R] f32; >= 1: off
    float const* min_p;              ///< [R] f32; <= 0: off
    float const* repetition_penalty; ///< [R] f32; 1: off
    float const* presence_penalty;   ///< [R] f32; 0: off
    float const* frequency_penalty;  ///< [R] f32; 0: off
    int32_t const* seed;             ///< [R, 2] i32, the low word first
    int32_t const* draw_index;       ///< [R] i32
    int32_t const* sample_slot;      ///< [R] i32; -1: no penalties, not counted
    int32_t* token_counts;           ///< [Q, V] i32, updated in place
    int32_t* tokens;                 ///< [R] i32; -1: the row's logits are not finite
    float* logprobs;                 ///< [R] f32
    int32_t* top_tokens;             ///< [R, 20] i32, best first
    float* top_logprobs;             ///< [R, 20] f32
    void* workspace;                 ///< sampleWorkspaceBytes(R, V), aligned to 16 bytes, any content
    int64_t rows;                    ///< R
    int64_t vocabulary;              ///< V, 20 to 2^21
    int64_t slots;                   ///< Q
};

/// Bytes of workspace for `rows` rows of `vocabulary` logits; grows with either.
size_t sampleWorkspaceBytes(int64_t rows, int64_t vocabulary);

/// A row whose sample_slot is not below Q draws -1 like one that is not finite: a wrong slot must not read out of
/// bounds, nor pass unseen. Results do not depend on the other rows. Returns cudaErrorInvalidValue for a V out of
/// range.
cudaError_t launchSample(SampleParams const& params, cudaStream_t stream);

} // namespace flint
