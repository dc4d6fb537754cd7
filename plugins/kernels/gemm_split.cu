// Matrix products of up to some hundred tokens, with K divided over the blocks of a cluster.
//
// Such a product is a read of its weights and little else, but a block that walks all of K alone takes its latency once
// per few tiles, and there are too few blocks to fill the GPU. So a cluster makes 128 rows of the output: each block
// multiplies its share of K, most or all of which is under way from the start, and sends its sums to the blocks that
// own them, through distributed shared memory; each adds what it owns in the order of ranks, and stores it. A weight is
// read once for 64 tokens, and how K is divided depends on the weight's size and the GPU only. Where the rows alone
// fill the GPU, a block has all of K, and no cluster.
#include "kernels/cluster.cuh"
#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_mma.cuh"
#include "kernels/launch.h"

#include <algorithm>

namespace flint {

namespace {

constexpr int kWARPS = 8; ///< each has a panel of its own
constexpr int kTHREADS = kWARPS * kWARP;
constexpr int kMOST_RANKS = 8;  ///< of a cluster that every GPU can have
constexpr int kLEAST_TILES = 4; ///< K-tiles of a block, about: what the exchange of sums is worth
constexpr int kMOST_STAGES = 12;
constexpr int kSCALE_TILES = 16; ///< in the ring of a panel's scales: those in stages, and what a group has beyond them
static_assert(kMOST_STAGES + 3 <= kSCALE_TILES);
constexpr int kGOOD_STAGES = 4;           ///< fewer would wait for each K-tile
constexpr int kSHARED_BYTES = 112 * 1024; ///< of a block, so that the next kernel's fit beside it
constexpr int kSTATIC_SHARED_BYTES = 256; ///< at most
constexpr int kCELL_BYTES = kWARP * sizeof(float4);

/// How a product is divided: blocks of a cluster, and K-tiles in a block's shared memory.
struct SplitPlan {
    int ranks;
    int stages;
};

/// Blocks of a cluster: as many as fill the GPU. Bits depend on it, so it must not depend on the tokens.
int splitRanks(GemmProblem const& problem, GemmDevice const& device) {
    int const row_blocks = (problem.panels + kWARPS - 1) / kWARPS;
    int const most = std::min(kMOST_RANKS, problem.columns / kTILE_COLUMNS / kLEAST_TILES);
    return std::clamp(device.processors / row_blocks, 1, std::max(most, 1));
}

template <WeightFormat F, GemmEpilogue E, int TOKENS_, bool PLAIN_>
struct SplitConfig {
    static constexpr WeightFormat FORMAT = F;
    static constexpr GemmEpilogue EPILOGUE = E;
    static constexpr int PANELS = 1; ///< of a warp
    static constexpr int TOKENS = TOKENS_;
    static constexpr bool PLAIN = PLAIN_;                   ///< activations are not ordered
    static constexpr int SLICE = TOKENS < 32 ? TOKENS : 32; ///< tokens that are skipped together
    static constexpr int STEPS = TOKENS / 8;                ///< of the matrix instruction's tokens

    // Shared memory: [stages] activations (128-byte rows, swizzled) and weights, scales, received sums.
    static constexpr int TILE_BYTES = F == WeightFormat::kNVFP4 ? 512 : 2048; ///< of a panel, without scales
    static constexpr int X_BYTES = TOKENS * 128;
    static constexpr int STAGE_BYTES = X_BYTES + kWARPS * TILE_BYTES;
    static constexpr int SCALE_BYTES = F == WeightFormat::kNVFP4 ? kSCALE_TILES * 64 : 0; ///< of a panel

    static int sharedBytes(int stages, int cells, int ranks) {
        int const received = ranks > 1 ? cells * ranks * kCELL_BYTES : 0;
        return stages * STAGE_BYTES + kWARPS * SCALE_BYTES + received;
    }
};

/// The cells of an output tile, 16 rows (a panel) by 8 tokens, four values of each lane. Cell 8 step + panel is added
/// up by rank cell / share.
struct SplitCells {
    int all;
    int share; ///< of a rank; the last ones may have less

    __host__ __device__ SplitCells(int tokens, int ranks)
        : all((tokens + 7) / 8 * kWARPS), share((all + ranks - 1) / ranks) {}

    __device__ int owned(int rank) const { return min(max(all - rank * share, 0), share); }
};

/// A barrier in shared memory that completes, again and again, when the copies of all threads have arrived.
class StageBarrier {
  public:
    /// By one thread; everyone else sees the barrier after a __syncthreads.
    __device__ __forceinline__ void open() {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(sharedAddress(&mState)), "r"(kTHREADS) : "memory");
    }

    /// Count this thread as soon as its copies so far are there.
    __device__ __forceinline__ void arriveAfterCopies() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(sharedAddress(&mState)) : "memory");
    }

    /// Wait for all threads; `parity` of the times that the barrier has completed before.
    __device__ __forceinline__ void wait(int parity) { waitMbarrier(&mState, parity); }

  private:
    uint64_t mState;
};

/// A block's share of K, from memory to the operands of a warp's panel.
template <typename C>
struct SplitSource {
    int tiles; ///< K-tiles of this block
    int group; ///< those whose scales stand together
    int tokens;
    uint32_t shared, scales; ///< shared memory: stages; the warp's ring of scales
    uint8_t const* weight;   ///< the panel at this block's first K-tile
    uint8_t const* weight_scales;
    uint8_t const* x; ///< at this thread's first token and 16 bytes
    uint32_t x_step;  ///< bytes to its next token
    int warp, lane;

    /// Panels past the last are read as the last, and not stored.
    __device__ SplitSource(GemmProblem const& problem, SplitPlan const& plan, uint32_t shared, int rank, int panel,
                           int token, int tokens, int warp, int lane)
        : tokens(tokens), shared(shared), warp(warp), lane(lane) {
        int const all = problem.columns / kTILE_COLUMNS;
        group = scaleGroup(all);
        int const first = all / group * rank / plan.ranks * group;
        tiles = all / group * (rank + 1) / plan.ranks * group - first;
        scales = shared + plan.stages * C::STAGE_BYTES + warp * C::SCALE_BYTES;
        uint8_t const* const start =
            problem.weight + min(panel, problem.panels - 1) * panelBytes(C::FORMAT, problem.columns);
        weight = start + first * C::TILE_BYTES + lane * 16;
        weight_scales = start + 8 * problem.columns + first * 64 + lane * 16;
        x_step = kTHREADS / 8 * 2u * problem.columns;
        x = problem.x + static_cast<uint32_t>((token + threadIdx.x / 8) * 2u * problem.columns + first * 128) +
            threadIdx.x % 8 * 16;
    }

    __device__ uint32_t stageOf(int stage) const { return shared + stage * C::STAGE_BYTES; }

    __device__ uint32_t panelOf(int stage) const {
        return stageOf(stage) + C::X_BYTES + warp * C::TILE_BYTES + lane * 16;
    }

    /// Place of a K-tile in the ring of scales.
    __device__ static uint32_t scaleOffset(int tile) { return tile % kSCALE_TILES * 64; }

    /// Each lane copies the very bytes that it reads itself; scales: the warp. Call it for one K-tile after another.
    __device__ __forceinline__ void copyWeights(int tile, int stage) const {
        uint32_t const target = panelOf(stage);
#pragma unroll
        for (int i = 0; i < C::TILE_BYTES / 512; ++i) {
            copyOnceAsync16(target + i * 512, weight + tile * C::TILE_BYTES + i * 512, true);
        }
        if constexpr (C::FORMAT == WeightFormat::kNVFP4) {
            if ((tile & (group - 1)) == 0 && lane < 4 * group) {
                copyOnceAsync16(scales + scaleOffset(tile) + lane * 16, weight_scales + tile * 64, true);
            }
        }
    }

    /// Rows past the last token keep what stands there: it only reaches columns of the product that are not stored.
    __device__ __forceinline__ void copyActivations(int tile, int stage) const {
        uint32_t const target = gemmChunk(stageOf(stage), threadIdx.x / 8, threadIdx.x % 8);
        constexpr int ROWS = kTHREADS / 8;
#pragma unroll
        for (int i = 0; i < (C::TOKENS + ROWS - 1) / ROWS; ++i) {
            if (static_cast<int>(threadIdx.x) / 8 + i * ROWS < tokens) {
                copyAsync16(target + i * ROWS * 128, x + i * x_step + tile * 128);
            }
        }
    }

    __device__ __forceinline__ GemmPanel<C::FORMAT> load(int tile, int stage) const {
        GemmPanel<C::FORMAT> panel;
        int const in_group = tile & (group - 1);
        panel.load(panelOf(stage), scales + scaleOffset(tile - in_group) + (lane * group + in_group) * 2);
        return panel;
    }
};

/// multiplyOperands with rows of activations that are not ordered: a lane reads the 16 columns that it multiplies, and
/// pairs them as gemmOrder would have.
template <typename C>
__device__ __forceinline__ void multiplyPlain(float (&acc)[C::PANELS][C::STEPS][4],
                                              uint32_t const (&a)[C::PANELS][4][4], uint32_t activations, int count,
                                              int lane) {
    uint32_t const low = gemmChunk(activations, lane / 4, lane % 4 * 2);
    uint32_t const high = gemmChunk(activations, lane / 4, lane % 4 * 2 + 1);
    constexpr int STEPS = C::SLICE / 8;
#pragma unroll
    for (int slice = 0; slice < C::TOKENS / C::SLICE; ++slice) {
        if (slice * C::SLICE < count) {
            uint4 words[STEPS][2];
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
                words[n][0] = detail::loadShared16(low + (slice * STEPS + n) * 1024);
                words[n][1] = detail::loadShared16(high + (slice * STEPS + n) * 1024);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int n = 0; n < STEPS; ++n) {
                    uint32_t b[2];
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
                        uint4 const& w = words[n][pair];
                        b[pair] = __byte_perm(i < 2 ? w.x : w.z, i < 2 ? w.y : w.w, i % 2 == 0 ? 0x5410 : 0x7632);
                    }
                    mma16816(acc[0][slice * STEPS + n], a[0][i], b[0], b[1]);
                }
            }
        }
    }
}

/// The store of a panel past the last stores nothing.
template <typename C>
__device__ PanelStore<C::FORMAT, C::EPILOGUE> splitStore(GemmProblem const& problem, int panel, int tokens, int lane) {
    bool const live = panel < problem.panels;
    int const last = live ? panel : problem.panels - 1;
    return {problem, last, live ? tokens : 0, panelScales<C::EPILOGUE>(problem, 0, last), lane};
}

/// Grid (row blocks x ranks, ceil(T / TOKENS)), clusters of `ranks`; no clusters for one rank.
template <typename C>
__global__ void __launch_bounds__(kTHREADS, 2)
    gemmSplitKernel(GemmProblem const __grid_constant__ problem, SplitPlan const plan) {
    extern __shared__ __align__(128) uint8_t buffer[];
    __shared__ StageBarrier filled[kMOST_STAGES];
    __shared__ CopyBarrier received;
    int const warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / kWARP, 0);
    int const lane = static_cast<int>(threadIdx.x) % kWARP;
    int const rank = clusterRank();
    int const panel = static_cast<int>(blockIdx.x) / plan.ranks * kWARPS + warp;
    int const token = static_cast<int>(blockIdx.y) * C::TOKENS, tokens = min(C::TOKENS, problem.positions - token);
    SplitSource<C> const source(problem, plan, sharedAddress(buffer), rank, panel, token, tokens, warp, lane);
    int const early = min(plan.stages, source.tiles);
    for (int tile = 0; tile < early; ++tile) {
        source.copyWeights(tile, tile);
    }
    SplitCells const cells(tokens, plan.ranks);
    bool const alone = plan.ranks == 1;
    int const owned = cells.owned(rank);
    int owner = warp / cells.share, cell = warp % cells.share; // of this warp's first sums
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < plan.stages; ++stage) {
            filled[stage].open();
        }
        if (!alone) {
            received.open();
            received.expect(owned * plan.ranks * kCELL_BYTES);
        }
    }
    // A warp adds up every eighth of its block's cells, all of one panel.
    auto const store = splitStore<C>(problem, panel - warp + (rank * cells.share + warp) % kWARPS, tokens, lane);
    __syncthreads();
    if (!alone) {
        arriveCluster();
    }
    bool const waits = problem.ready != GemmReady::kAll;
    if (waits) {
        allowSuccessor();
        waitForPredecessor();
    }
    for (int tile = 0; tile < early; ++tile) {
        source.copyActivations(tile, tile);
        filled[tile].arriveAfterCopies();
    }

    float acc[C::PANELS][C::STEPS][4] = {};
    int stage = 0, parity = 0;
    for (int tile = 0; tile < source.tiles; ++tile) {
        int const next = tile - 1 + plan.stages;
        if (tile > 0 && next < source.tiles) {
            __syncthreads(); // the stage of the K-tile before is read no more
            int const free = (stage == 0 ? plan.stages : stage) - 1;
            source.copyWeights(next, free);
            source.copyActivations(next, free);
            filled[free].arriveAfterCopies();
        }
        filled[stage].wait(parity);
        uint32_t a[C::PANELS][4][4];
        source.load(tile, stage).operands(a[0]);
        if constexpr (C::PLAIN) {
            multiplyPlain<C>(acc, a, source.stageOf(stage), tokens, lane);
        } else {
            multiplyOperands<C>(acc, a, source.stageOf(stage), tokens, lane);
        }
        if (++stage == plan.stages) {
            stage = 0;
            parity ^= 1;
        }
    }

    if (!waits) {
        waitForPredecessor();
        allowSuccessor(); // now: what the kernel before this one wrote is complete for the next
    }
    auto const rowOf = [token](int its) {
        return token + its;
    };
    if (alone) { // a warp's sums are the cells that it owns
#pragma unroll
        for (int step = 0; step < C::STEPS; ++step) {
            if (step * kWARPS < cells.all) {
                float const(&d)[4] = acc[0][step];
                store.run(step, make_float4(d[0], d[1], d[2], d[3]), rowOf);
            }
        }
        return;
    }
    // [cells owned][ranks][lanes]
    float4* const sums =
        reinterpret_cast<float4*>(buffer + plan.stages * C::STAGE_BYTES + kWARPS * C::SCALE_BYTES) + lane;
    waitCluster(); // all its blocks run and can receive
#pragma unroll
    for (int step = 0; step < C::STEPS; ++step) {
        if (step * kWARPS < cells.all) {
            float const(&d)[4] = acc[0][step];
            sendAsync(peerAddress(sums + (cell * plan.ranks + rank) * kWARP, owner),
                      make_float4(d[0], d[1], d[2], d[3]), peerAddress(&received, owner));
            for (cell += kWARPS; cell >= cells.share; cell -= cells.share) {
                ++owner;
            }
        }
    }
    received.wait();
    for (int own = warp; own < owned; own += kWARPS) {
        float4 parts[kMOST_RANKS];
#pragma unroll
        for (int from = 0; from < kMOST_RANKS; ++from) {
            if (from < plan.ranks) {
                parts[from] = sums[(own * plan.ranks + from) * kWARP];
            }
        }
        float4 sum = parts[0];
#pragma unroll
        for (int from = 1; from < kMOST_RANKS; ++from) {
            if (from < plan.ranks) {
                sum.x += parts[from].x;
                sum.y += parts[from].y;
                sum.z += parts[from].z;
                sum.w += parts[from].w;
            }
        }
        store.run((rank * cells.share + own) / kWARPS, sum, rowOf);
    }
}

template <typename C>
cudaError_t launchConfig(GemmProblem const& problem, GemmDevice const& device, cudaStream_t stream) {
    auto const kernel = gemmSplitKernel<C>;
    int const ranks = splitRanks(problem, device);
    int const tiles = problem.columns / kTILE_COLUMNS, group = scaleGroup(tiles);
    int const most = (tiles / group + ranks - 1) / ranks * group; // K-tiles of a block
    int const cells = SplitCells(std::min(problem.positions, C::TOKENS), ranks).share;
    auto const stagesWithin = [&](int bytes) {
        return (bytes - C::sharedBytes(0, cells, ranks)) / C::STAGE_BYTES;
    };
    int const limit = device.shared_bytes - kSTATIC_SHARED_BYTES;
    int const fit = std::max(stagesWithin(std::min(limit, kSHARED_BYTES)), std::min(stagesWithin(limit), kGOOD_STAGES));
    SplitPlan const plan{ranks, std::min({most, fit, kMOST_STAGES})};
    int const bytes = C::sharedBytes(plan.stages, cells, ranks);
    if (cudaError_t const status = allowShared(kernel, bytes); status != cudaSuccess) {
        return status;
    }
    unsigned const blocks = (problem.panels + kWARPS - 1) / kWARPS * ranks;
    dim3 const grid(blocks, (problem.positions + C::TOKENS - 1) / C::TOKENS);
    return launchCluster(kernel, grid, dim3(kTHREADS), ranks, bytes, stream, problem, plan);
}

template <WeightFormat F, GemmEpilogue E, bool PLAIN>
cudaError_t launchTokens(GemmProblem const& problem, GemmDevice const& device, cudaStream_t stream) {
    static_assert(kSPLIT_TOKENS == 64);
    return problem.positions <= 16   ? launchConfig<SplitConfig<F, E, 16, PLAIN>>(problem, device, stream)
           : problem.positions <= 32 ? launchConfig<SplitConfig<F, E, 32, PLAIN>>(problem, device, stream)
                                     : launchConfig<SplitConfig<F, E, 64, PLAIN>>(problem, device, stream);
}

template <WeightFormat F>
cudaError_t launchFormat(GemmProblem const& problem, GemmEpilogue epilogue, bool plain, GemmDevice const& device,
                         cudaStream_t stream) {
    if (epilogue == GemmEpilogue::kSwiGlu) {
        return plain ? cudaErrorInvalidValue : launchTokens<F, GemmEpilogue::kSwiGlu, false>(problem, device, stream);
    }
    return plain ? launchTokens<F, GemmEpilogue::kStore, true>(problem, device, stream)
                 : launchTokens<F, GemmEpilogue::kStore, false>(problem, device, stream);
}

} // namespace

cudaError_t launchGemmSplit(WeightFormat format, GemmProblem const& problem, GemmEpilogue epilogue, bool plain,
                            GemmDevice const& device, cudaStream_t stream) {
    return format == WeightFormat::kNVFP4 ? launchFormat<WeightFormat::kNVFP4>(problem, epilogue, plain, device, stream)
                                          : launchFormat<WeightFormat::kBF16>(problem, epilogue, plain, device, stream);
}

} // namespace flint
