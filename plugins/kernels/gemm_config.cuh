// Tile shapes of the matrix products, and their shared memory.
//
// Weights are the A operand: each warp owns PANELS panels of 16 rows alone, so a block dequantises a weight once for
// all its tokens. 32 rows by 128 tokens a warp reads 64 KB of activations from shared memory per 2^20 multiply-adds,
// about half of what mma.sync leaves time for; 16 by 128 would be bound by it.
#pragma once

#include "kernels/gemm_problem.h"
#include "kernels/panel.cuh"

#include <type_traits>

namespace flint {

/// AHEAD: K-tiles under way before they are used. LAG: K-tiles whose operands may still be read after the barrier of
/// the next (1: wgmma runs on across it).
template <WeightFormat F, GemmEpilogue E, int PANELS_, int WARPS_, int TOKENS_, int AHEAD_, int LAG_, int BLOCKS_>
struct GemmConfig {
    static constexpr WeightFormat FORMAT = F;
    static constexpr GemmEpilogue EPILOGUE = E;
    static constexpr int PANELS = PANELS_; ///< of a warp
    static constexpr int WARPS = WARPS_;
    static constexpr int TOKENS = TOKENS_; ///< of a block
    static constexpr int AHEAD = AHEAD_;
    static constexpr bool WGMMA = LAG_ > 0;
    static constexpr int BLOCKS = BLOCKS_; ///< of a multiprocessor, at least, as far as registers go

    static constexpr int THREADS = WARPS * kWARP;
    static constexpr int BLOCK_PANELS = PANELS * WARPS;
    static constexpr int STAGES = AHEAD + 1 + LAG_;
    static constexpr int X_COPIES = TOKENS * 8 / THREADS;                     ///< 16-byte copies of a thread per K-tile
    static constexpr int TILE_BYTES = F == WeightFormat::kNVFP4 ? 512 : 2048; ///< of a panel, without scales

    /// Tokens that are skipped together where a tile is not full, and that the epilogue handles at once.
    static constexpr int SLICE = TOKENS < 32 ? TOKENS : 32;

    // Shared memory: [stages] activations (128-byte rows, swizzled), [stages] weights, scales, epilogue.
    static constexpr int X_BYTES = TOKENS * 128;
    static constexpr int W_BYTES = BLOCK_PANELS * TILE_BYTES;
    /// Scales of a panel: a ring of groups, long enough that no group is overwritten before its last tile is used.
    static constexpr int SCALE_BYTES = F == WeightFormat::kNVFP4 ? 256 * ((AHEAD + 3) / 4 + 1) : 0;
    static constexpr int OUT_ROW_BYTES =
        E == GemmEpilogue::kStore ? BLOCK_PANELS * 32 : BLOCK_PANELS * 16 + 4; ///< + 4: spreads banks
    static constexpr int W_OFFSET = STAGES * X_BYTES;
    static constexpr int SCALE_OFFSET = W_OFFSET + STAGES * W_BYTES;
    static constexpr int OUT_OFFSET = SCALE_OFFSET + BLOCK_PANELS * SCALE_BYTES;
    static constexpr int SHARED_BYTES = OUT_OFFSET + SLICE * OUT_ROW_BYTES;

    /// Place in the block's rows of a warp's panel `p`. A wgmma takes one panel from each of four warps.
    __device__ static int blockPanel(int warp, int p) {
        return WGMMA ? (warp / 4) * 4 * PANELS + p * 4 + warp % 4 : warp * PANELS + p;
    }
};

// 128 accumulators a thread: 256 rows x 128 tokens.
template <WeightFormat F, GemmEpilogue E>
using GemmLarge = GemmConfig<F, E, 2, 8, 128, 2, 0, 1>;
template <WeightFormat F, GemmEpilogue E>
using GemmLargeWgmma = GemmConfig<F, E, 2, 8, 128, F == WeightFormat::kNVFP4 ? 3 : 2, 1, 1>;
// 128 rows x 64 tokens, three blocks on a multiprocessor where shared memory allows.
template <WeightFormat F, GemmEpilogue E>
using GemmMedium = GemmConfig<F, E, 2, 4, 64, 2, 0, 3>;
// SwiGLU needs 64 units in a block to write whole sectors of the ordered activation.
template <WeightFormat F, GemmEpilogue E>
using GemmSmall = GemmConfig<F, E, E == GemmEpilogue::kStore ? 1 : 2, 4, 32, 5, 0, 3>;
// A few tokens read each weight once and do little with it, so bytes under way are what counts.
template <WeightFormat F, GemmEpilogue E>
using GemmTiny =
    std::conditional_t<E == GemmEpilogue::kStore, GemmConfig<F, E, 1, 4, 16, F == WeightFormat::kNVFP4 ? 11 : 5, 0, 3>,
                       GemmConfig<F, E, 2, 4, 16, 5, 0, 3>>;

} // namespace flint
