// What a matrix-product kernel gets, dense or grouped by expert, and the launch that both share. Internal to gemm*.cu
// and moe_prefill*.cu.
#pragma once

#include "kernels/gemm.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flint {

/// Tokens x rows of a block, from 128 x 256 down to 16 x 64.
enum class GemmShape { kLarge, kMedium, kSmall, kTiny };

/// Consecutive positions of one expert's token list that a block handles together.
struct GemmGroup {
    int32_t expert;
    int32_t first; ///< position
    int32_t count; ///< at least 1
    int32_t unused;
};

/// What of a product's inputs does not depend on the kernel before it: either it never does, or it was complete when
/// that kernel called allowSuccessor(). What is read before the wait is read past L1, which may hold what stood there
/// in the layer before.
enum class GemmReady {
    kNothing, ///< of a grouped product; it waits first
    kWeights, ///< and the groups: it waits when its first weights are under way
    kAll      ///< it waits at its end: y must be memory that the kernel before it does not touch
};

/// A position is a row of the product: a token, or a (token, slot) pair in expert order.
struct GemmProblem {
    uint8_t const* x;           ///< [*, K] bf16 ordered
    uint8_t const* weight;      ///< [E or 1, N / 16, panel]
    float const* scale;         ///< [E or 1, scale_stride]; nullptr for BF16
    uint8_t* y;                 ///< [*, N] or [*, N / 2] bf16
    int32_t const* x_rows;      ///< [positions]: row of x; nullptr: the position itself
    int32_t const* y_rows;      ///< kStore: [positions]: row of y; nullptr: the position itself
    GemmGroup const* groups;    ///< [group_count]; nullptr: dense, positions 0 .. positions - 1 in order
    int32_t const* group_count; ///< [1]
    int32_t positions;
    int32_t columns;           ///< K
    int32_t panels;            ///< N / 16
    int32_t scale_stride;      ///< scales per expert
    int32_t segment_panels[2]; ///< first panels of scale segments 1 and 2
    bool round_gate_up;        ///< kSwiGlu: round gate and up to BF16 first (dense and shared MLP)
    GemmReady ready;           ///< dense: at least kWeights
};

/// Positions of a tile; its rows are in gemm_config.cuh.
constexpr int gemmShapeTokens(GemmShape shape) {
    return shape == GemmShape::kLarge ? 128 : shape == GemmShape::kMedium ? 64 : shape == GemmShape::kSmall ? 32 : 16;
}

struct GemmDevice {
    int processors;
    int shared_bytes; ///< that a block can have
};

cudaError_t gemmDevice(GemmDevice& info);

/// Whether the GPU has the shared memory for a tile shape; kMedium fits all GPUs.
bool gemmFits(WeightFormat format, GemmEpilogue epilogue, GemmShape shape, GemmDevice const& device);

/// `max_groups` bounds the groups of a grouped problem, or counts the token tiles of a dense one.
cudaError_t launchGemmNvfp4(GemmProblem const& problem, GemmEpilogue epilogue, GemmShape shape, int64_t max_groups,
                            cudaStream_t stream);
cudaError_t launchGemmBf16(GemmProblem const& problem, GemmEpilogue epilogue, GemmShape shape, int64_t max_groups,
                           cudaStream_t stream);
cudaError_t launchGemmProblem(WeightFormat format, GemmProblem const& problem, GemmEpilogue epilogue, GemmShape shape,
                              int64_t max_groups, cudaStream_t stream);

/// Whether the GPU has the shared memory, and the multiprocessors, for launchGemmStream.
bool gemmStreamFits(int64_t columns, int tokens, int64_t max_groups, GemmDevice const& device);

/// A grouped problem in NVFP4 whose groups have few positions, at most `tokens`: gemm_stream.cu.
cudaError_t launchGemmStream(GemmProblem const& problem, GemmEpilogue epilogue, int tokens, int64_t max_groups,
                             GemmDevice const& device, cudaStream_t stream);

/// A dense problem whose K is divided (dividesColumns); x is ordered unless `plain`.
cudaError_t launchGemmSplit(WeightFormat format, GemmProblem const& problem, GemmEpilogue epilogue, bool plain,
                            GemmDevice const& device, cudaStream_t stream);

} // namespace flint
