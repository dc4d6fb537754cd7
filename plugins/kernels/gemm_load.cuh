// The load side of a matrix product: which output tiles a block makes, and the copies that run ahead of the arithmetic,
// across the borders of output tiles.
#pragma once

#include "kernels/device.cuh"
#include "kernels/gemm_config.cuh"

#include <cstdint>

namespace flint {

/// One output tile: BLOCK_PANELS panels of an expert times up to TOKENS positions.
struct GemmWork {
    int expert;
    int first; ///< position
    int count; ///< of positions
    int panel; ///< first panel
};

/// Output tiles, panels fastest: blocks that run together share activations through L2, and weights where tokens do.
template <typename C>
struct GemmSchedule {
    GemmProblem const& problem;
    unsigned row_blocks;
    unsigned total;

    /// Reads the number of groups: after waitForPredecessor() where nothing is ready.
    __device__ explicit GemmSchedule(GemmProblem const& problem) : problem(problem) {
        row_blocks = (problem.panels + C::BLOCK_PANELS - 1) / C::BLOCK_PANELS;
        unsigned const groups = problem.groups != nullptr ? static_cast<unsigned>(__ldcg(problem.group_count))
                                                          : (problem.positions + C::TOKENS - 1u) / C::TOKENS;
        total = groups * row_blocks;
    }

    __device__ GemmWork work(unsigned index) const {
        unsigned const group = index / row_blocks;
        int const panel = static_cast<int>(index - group * row_blocks) * C::BLOCK_PANELS;
        if (problem.groups != nullptr) {
            int4 const entry = __ldcg(reinterpret_cast<int4 const*>(problem.groups + group)); // past L1, see GemmReady
            return {entry.x, entry.y, entry.z, panel};
        }
        int const first = static_cast<int>(group) * C::TOKENS;
        return {0, first, min(C::TOKENS, problem.positions - first), panel};
    }
};

/// Shared address of 16-byte chunk `chunk` (0 .. 7) of token `token` of an activation stage: wgmma's 128-byte swizzle.
/// Eight tokens at one chunk, what ldmatrix reads at once, lie in eight different groups of four banks.
__device__ __forceinline__ uint32_t gemmChunk(uint32_t stage, int token, int chunk) {
    return stage + token * 128 + ((chunk ^ (token & 7)) << 4);
}

/// GemmProblem::ready. The instances with wgmma have no register left for more than they need.
template <typename C>
__device__ __forceinline__ GemmReady gemmReady(GemmProblem const& problem) {
    if constexpr (C::WGMMA) {
        return problem.groups == nullptr ? GemmReady::kWeights : GemmReady::kNothing;
    } else {
        return problem.ready;
    }
}

/// Issues the copies of one K-tile after another. Every thread copies its share of the activations; a warp copies its
/// own panels, and each lane the very bytes that it reads itself (scales: the warp).
template <typename C>
struct GemmLoader {
    static constexpr int ROW_STEP = C::THREADS / 8; ///< tokens between a thread's copies
    static constexpr uint32_t NO_ROW = 0xFFFFFFFFu;
    static constexpr bool SKIPS = !C::WGMMA; ///< wgmma's instances have no register left for it

    GemmSchedule<C> const& schedule;
    uint32_t shared;
    int lane, warp;
    int tiles, tiles_in_group; ///< K-tiles; of them, those whose scales stand together
    unsigned index;            ///< output tile
    int tile = 0, stage = 0;
    int scale_offset = 0;
    uint8_t const* panels[C::PANELS];
    uint32_t rows[C::X_COPIES]; ///< byte offset in x of this thread's chunk of K-tile 0

    __device__ GemmLoader(GemmSchedule<C> const& schedule, uint32_t shared, int warp, int lane)
        : schedule(schedule), shared(shared), lane(lane), warp(warp), tiles(schedule.problem.columns / kTILE_COLUMNS),
          tiles_in_group(scaleGroup(tiles)), index(blockIdx.x) {}

    __device__ bool live() const { return index < schedule.total; }

    /// Aim at the weights of the current output tile. Panels past the last are read as the last, and not stored.
    __device__ void aimWeights(GemmWork const& work) {
        GemmProblem const& problem = schedule.problem;
        int64_t const bytes = panelBytes(C::FORMAT, problem.columns);
#pragma unroll
        for (int p = 0; p < C::PANELS; ++p) {
            int const panel = min(work.panel + C::blockPanel(warp, p), problem.panels - 1);
            panels[p] = problem.weight + (static_cast<int64_t>(work.expert) * problem.panels + panel) * bytes;
        }
    }

    /// Aim at the activations. Past the last position nothing (or the last again) is copied: what then stands in the
    /// stage only reaches columns of the product that are not stored.
    __device__ void aimActivations(GemmWork const& work) {
        GemmProblem const& problem = schedule.problem;
#pragma unroll
        for (int i = 0; i < C::X_COPIES; ++i) {
            int const token = static_cast<int>(threadIdx.x) / 8 + i * ROW_STEP;
            rows[i] = NO_ROW;
            if (!SKIPS || token < work.count) {
                int const position = work.first + min(token, work.count - 1);
                uint32_t const row = problem.x_rows != nullptr ? __ldcg(problem.x_rows + position) : position;
                rows[i] = row * (2u * problem.columns) + (threadIdx.x % 8) * 16;
            }
        }
    }

    __device__ void copyWeights() {
#pragma unroll
        for (int p = 0; p < C::PANELS; ++p) {
            int const slot = warp * C::PANELS + p;
            uint32_t const target = shared + C::W_OFFSET + stage * C::W_BYTES + slot * C::TILE_BYTES + lane * 16;
            uint8_t const* const source = panels[p] + static_cast<uint32_t>(tile * C::TILE_BYTES) + lane * 16;
#pragma unroll
            for (int i = 0; i < C::TILE_BYTES / 512; ++i) {
                copyAsync16(target + i * 512, source + i * 512);
            }
        }
        if constexpr (C::FORMAT == WeightFormat::kNVFP4) {
            if ((tile & (tiles_in_group - 1)) == 0) {
                if (lane < 4 * tiles_in_group) {
#pragma unroll
                    for (int p = 0; p < C::PANELS; ++p) {
                        int const slot = warp * C::PANELS + p;
                        copyAsync16(shared + C::SCALE_OFFSET + slot * C::SCALE_BYTES + scale_offset + lane * 16,
                                    panels[p] + 8 * schedule.problem.columns + tile * 64 + lane * 16);
                    }
                }
                scale_offset += 64 * tiles_in_group;
                scale_offset = scale_offset == C::SCALE_BYTES ? 0 : scale_offset;
            }
        }
    }

    __device__ void copyActivations() {
        static_assert(ROW_STEP % 8 == 0, "so that all copies of a thread have the same swizzle");
        uint8_t const* const source = schedule.problem.x + static_cast<uint32_t>(tile * 128);
        uint32_t const target = gemmChunk(shared + stage * C::X_BYTES, threadIdx.x / 8, threadIdx.x % 8);
#pragma unroll
        for (int i = 0; i < C::X_COPIES; ++i) {
            if (!SKIPS || rows[i] != NO_ROW) {
                copyAsync16(target + i * (ROW_STEP * 128), source + rows[i]);
            }
        }
    }

    /// Go on to the next K-tile; where the output tile ends, to the block's next. Its group and its entries of x_rows
    /// are brought into L1 long before, in two steps because one leads to the other.
    __device__ void advance() {
        stage = stage + 1 == C::STAGES ? 0 : stage + 1;
        ++tile;
        if (tile == tiles) {
            tile = 0;
            index += gridDim.x;
            if (live()) {
                GemmWork const work = schedule.work(index);
                aimWeights(work);
                aimActivations(work);
                prefetchGroup();
            }
        } else if (tile == tiles / 2) {
            prefetchRows();
        }
    }

    __device__ void prefetchGroup() const {
        unsigned const next = index + gridDim.x;
        if (schedule.problem.groups != nullptr && next < schedule.total) {
            prefetch(schedule.problem.groups + next / schedule.row_blocks);
        }
    }

    __device__ void prefetchRows() const {
        unsigned const next = index + gridDim.x;
        if (schedule.problem.x_rows != nullptr && next < schedule.total) {
            GemmWork const work = schedule.work(next);
#pragma unroll
            for (int i = 0; i < C::X_COPIES; ++i) {
                int const token = static_cast<int>(threadIdx.x) / 8 + i * ROW_STEP;
                prefetch(schedule.problem.x_rows + work.first + min(token, work.count - 1));
            }
        }
    }

    __device__ static void prefetch(void const* pointer) { asm volatile("prefetch.global.L1 [%0];" ::"l"(pointer)); }

    /// Copy one K-tile, if any is left, as one group of copies.
    __device__ void step() {
        if (live()) {
            copyWeights();
            copyActivations();
            advance();
        }
        commitCopies();
    }

    /// Start the first AHEAD K-tiles.
    __device__ void start() {
        bool const waits = gemmReady<C>(schedule.problem) == GemmReady::kWeights;
        int early = 0;
        if (waits && live()) {
            aimWeights(schedule.work(index));
            early = min(C::AHEAD, tiles);
            for (; tile < early; ++tile, ++stage) {
                copyWeights();
            }
            tile = stage = 0;
        }
        if (waits) {
            waitForPredecessor();
        }
        if (live()) {
            GemmWork const first = schedule.work(index);
            aimWeights(first);
            aimActivations(first);
            prefetchGroup();
        }
        for (int i = 0; i < C::AHEAD; ++i) {
            if (live()) {
                if (i >= early) {
                    copyWeights();
                }
                copyActivations();
                advance();
            }
            commitCopies();
        }
    }
};

namespace detail {

__device__ __forceinline__ uint4 loadShared16(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint32_t loadShared2(uint32_t address) {
    uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return value;
}

} // namespace detail

/// A lane's part of one panel's K-tile, as it is stored; load() takes the lane's shared addresses.
template <WeightFormat F>
struct GemmPanel;

template <>
struct GemmPanel<WeightFormat::kNVFP4> {
    uint4 codes;
    uint32_t scales;

    __device__ __forceinline__ void load(uint32_t data, uint32_t scale) {
        codes = detail::loadShared16(data);
        scales = detail::loadShared2(scale);
    }

    __device__ __forceinline__ void operands(uint32_t (&a)[4][4]) const { dequantize(codes, scales, a); }
};

template <>
struct GemmPanel<WeightFormat::kBF16> {
    uint4 fragments[4];

    __device__ __forceinline__ void load(uint32_t data, uint32_t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            fragments[i] = detail::loadShared16(data + i * 512);
        }
    }

    __device__ __forceinline__ void operands(uint32_t (&a)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i][0] = fragments[i].x;
            a[i][1] = fragments[i].y;
            a[i][2] = fragments[i].z;
            a[i][3] = fragments[i].w;
        }
    }
};

/// Reads the weights of one K-tile after another.
template <typename C>
struct GemmWeights {
    uint32_t shared; ///< of this warp's lane
    uint32_t scales;
    int tiles_in_group;
    int scale_offset = 0, tile_in_group = 0;

    __device__ GemmWeights(uint32_t base, int warp, int lane, int tiles)
        : shared(base + C::W_OFFSET + warp * C::PANELS * C::TILE_BYTES + lane * 16), tiles_in_group(scaleGroup(tiles)) {
        scales = base + C::SCALE_OFFSET + warp * C::PANELS * C::SCALE_BYTES + lane * 2 * tiles_in_group;
    }

    /// Go on to the next K-tile.
    __device__ void advance() {
        if constexpr (C::FORMAT == WeightFormat::kNVFP4) {
            if (++tile_in_group == tiles_in_group) {
                tile_in_group = 0;
                scale_offset += 64 * tiles_in_group;
                scale_offset = scale_offset == C::SCALE_BYTES ? 0 : scale_offset;
            }
        }
    }

    __device__ GemmPanel<C::FORMAT> load(int stage, int p) const {
        GemmPanel<C::FORMAT> data;
        data.load(shared + stage * C::W_BYTES + p * C::TILE_BYTES,
                  scales + p * C::SCALE_BYTES + scale_offset + 2 * tile_in_group);
        return data;
    }

    /// The operands of instructions 2 half and 2 half + 1, of a panel in BF16.
    __device__ void loadHalf(GemmPanel<C::FORMAT>& data, int stage, int p, int half) const {
        uint32_t const source = shared + stage * C::W_BYTES + p * C::TILE_BYTES;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            data.fragments[2 * half + i] = detail::loadShared16(source + (2 * half + i) * 512);
        }
    }
};

} // namespace flint
