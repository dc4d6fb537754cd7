// Token embedding: out[t] = table[token_ids[t]].
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

struct EmbeddingParams {
    int32_t const* token_ids; ///< [T] i32
    void const* table;        ///< [V, H] bf16, aligned to 16 bytes
    void* out;                ///< [T, H] bf16, aligned to 16 bytes
    int64_t tokens;           ///< T
    int64_t vocabulary;       ///< V
    int64_t hidden;           ///< H, a multiple of 8
};

/// A token id outside [0, V) gives a row of NaN: a wrong id must not read out of bounds, nor pass unseen.
/// Returns cudaErrorInvalidValue if H is no multiple of 8.
cudaError_t launchEmbedding(EmbeddingParams const& params, cudaStream_t stream);

} // namespace flint
