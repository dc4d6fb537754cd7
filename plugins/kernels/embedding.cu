#include "kernels/embedding.h"

namespace flint {

namespace {

constexpr int kTHREADS = 128;
constexpr int kVECTOR = 8; // BF16 values in 16 bytes.
constexpr uint32_t kNAN_PAIR = 0x7FFF7FFF;

/// Grid (T); each block copies one row.
__global__ void __launch_bounds__(kTHREADS)
    embeddingKernel(int32_t const* __restrict__ tokenIds, int32_t const* __restrict__ lastTokens,
                    uint4 const* __restrict__ table, uint4* __restrict__ out, int64_t slots, int64_t vocabulary,
                    int64_t vectors) {
    int token = tokenIds[blockIdx.x];
    if (token < 0) {
        int const slot = -1 - token;
        token = slot < slots ? lastTokens[slot] : -1;
    }
    uint4* const row = out + blockIdx.x * vectors;
    if (token < 0 || token >= vocabulary) {
        for (int64_t i = threadIdx.x; i < vectors; i += kTHREADS) {
            row[i] = make_uint4(kNAN_PAIR, kNAN_PAIR, kNAN_PAIR, kNAN_PAIR);
        }
        return;
    }
    uint4 const* const source = table + int64_t{token} * vectors;
#pragma unroll 1 // a thread copies two vectors; unrolled for more, ptxas spills
    for (int64_t i = threadIdx.x; i < vectors; i += kTHREADS) {
        row[i] = __ldg(source + i);
    }
}

} // namespace

cudaError_t launchEmbedding(EmbeddingParams const& params, cudaStream_t stream) {
    if (params.hidden % kVECTOR != 0) {
        return cudaErrorInvalidValue;
    }
    if (params.tokens == 0) {
        return cudaSuccess;
    }
    embeddingKernel<<<static_cast<unsigned>(params.tokens), kTHREADS, 0, stream>>>(
        params.token_ids, params.last_tokens, static_cast<uint4 const*>(params.table), static_cast<uint4*>(params.out),
        params.slots, params.vocabulary, params.hidden / kVECTOR);
    return cudaGetLastError();
}

} // namespace flint
