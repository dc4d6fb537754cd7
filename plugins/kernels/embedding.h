// Token embedding: out[t] = table[token], where token = token_ids[t], or the token last drawn for sample slot
// -1 - token_ids[t] if that is negative.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

struct EmbeddingParams {
    int32_t const* token_ids;   ///< [T] i32
    int32_t const* last_tokens; ///< [Q] i32
    void const* table;          ///< [V, H] bf16, aligned to 16 bytes
    void* out;                  ///< [T, H] bf16, aligned to 16 bytes
    int64_t tokens;             ///< T
    int64_t slots;              ///< Q
    int64_t vocabulary;         ///< V
    int64_t hidden;             ///< H, a multiple of 8
};

/// A token outside [0, V) or a slot outside [0, Q) gives a row of NaN: a wrong id must not read out of bounds, nor pass
/// unseen, and a sequence whose last row drew no token must draw none from the next.
/// Returns cudaErrorInvalidValue if H is no multiple of 8.
cudaError_t launchEmbedding(EmbeddingParams const& params, cudaStream_t stream);

} // namespace flint
