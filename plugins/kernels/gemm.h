// Matrix products beyond the low-latency path: tokens times a packed weight, y[t, n] = r(sum_k x[t, k] w[n, k] *
// tensor_scale).
//
// Activations that a product reads are "ordered": [rows, K] row-major with every 64 columns permuted by gemmOrder
// (gemm_order.cuh).
//
// Bits: of a few tokens (dividesColumns) K is divided over the blocks of a cluster (gemm_split.cu), into a number of
// parts that N, K and the GPU's multiprocessors decide, so a row's result does not depend on T. Of more tokens no part
// of K is summed apart: every tile shape takes K in one order, so with mma.sync a row's result does not depend on T or
// on the shape; on compute capability 9.0 kLarge uses wgmma, so bits may change where it starts to be chosen.
#pragma once

#include "kernels/types.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

enum class GemmEpilogue {
    kStore, ///< y plain
    kSwiGlu ///< gate/up panels in, act = r(g / (1 + exp(-g)) * u) out, ordered
};

/// Most tokens of a block of gemm_split.cu, and of a step whose other kernels are made for latency, too.
constexpr int64_t kSPLIT_TOKENS = 64;

/// Whether a product's K is divided over the blocks of a cluster: up to kSPLIT_TOKENS tokens; and up to 512 if it makes
/// so few values that the tiles of undivided products would leave most of a GPU idle.
constexpr bool dividesColumns(int64_t tokens, int64_t rows) {
    return tokens <= kSPLIT_TOKENS || (tokens <= 512 && tokens * rows <= 1 << 20);
}

struct GemmParams {
    WeightFormat format;
    GemmEpilogue epilogue;
    void const* x;                   ///< [T, K] bf16, ordered unless `plain`, aligned to 16 bytes
    void const* weight;              ///< [N / 16, panel] packed, aligned to 16 bytes
    float const* scale;              ///< f32 [segments of rows], or [2] gate, up with kSwiGlu; nullptr for BF16
    void* y;                         ///< kStore: [T, N] bf16 plain; kSwiGlu: [T, N / 2] bf16 ordered; 16-byte aligned
    int64_t tokens;                  ///< T
    int64_t rows;                    ///< N, a multiple of 16; of 128 with kSwiGlu
    int64_t columns;                 ///< K, a multiple of 64
    int64_t segment_row[2] = {0, 0}; ///< kStore: first rows of scale segments 1 and 2, multiples of 16; 0: none
    bool plain = false;              ///< kStore, if dividesColumns(): x is plain
    bool x_ready = false;            ///< if dividesColumns(): see GemmReady::kAll (gemm_problem.h)
};

/// Returns cudaErrorInvalidValue for shapes outside the limits above, or where T * K reaches 2^31.
cudaError_t launchGemm(GemmParams const& params, cudaStream_t stream);

struct GemmOrderParams {
    void const* x;   ///< [T, K] bf16 plain, aligned to 16 bytes
    void* ordered;   ///< [T, K] bf16 ordered, aligned to 16 bytes, not x itself
    int64_t tokens;  ///< T
    int64_t columns; ///< K, a multiple of 64
};

/// Order an activation whose producer writes it plain.
cudaError_t launchGemmOrder(GemmOrderParams const& params, cudaStream_t stream);

} // namespace flint
