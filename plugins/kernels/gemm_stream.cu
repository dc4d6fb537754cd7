// Grouped matrix products of few tokens a group: NormMoe's experts in NVFP4, for more tokens than the low-latency path
// takes.
//
// Such a product reads the weights of each chosen expert once and does little with them, so what counts is bytes under
// way, and instructions a byte. A block takes an equal part of all groups' panels. Each of its warps streams whole
// panels through a ring of its own in shared memory, by the copy engine; one more warp brings the activations of the
// block's groups, as many groups at once as have room, into two halves in turn. So no warp waits for another, unless it
// is a whole half behind. K is summed in the order of gemmKernel, so the bits are its.
#include "kernels/gemm_epilogue.cuh"
#include "kernels/launch.h"

#include <algorithm>

namespace flint {

namespace {

constexpr int kMOST_WARPS = 16; ///< that multiply
constexpr int kLEAST_WARPS = 4;
constexpr int kMOST_STAGES = 4; ///< of a warp's ring
constexpr int kLEAST_STAGES = 2;
constexpr int kMOST_TOKENS = 16;           ///< of a group
constexpr int kMOST_GROUPS = 32;           ///< that a block has panels of
constexpr int kSTATIC_SHARED_BYTES = 2048; ///< at most
constexpr int kROW_PAD = 16;               ///< bytes: the rows that ldmatrix reads at once lie in different banks

struct StreamPlan {
    int warps;  ///< that multiply
    int stages; ///< of a warp's ring
    int rows;   ///< of activations in one half
};

/// A stage of a warp's ring: TILES K-tiles of a panel, whose scales stand together.
template <int TILES>
struct StreamStage {
    static constexpr int TILE_BYTES = 512;
    static constexpr int DATA_BYTES = TILES * TILE_BYTES;
    static constexpr int SCALE_BYTES = TILES * 64;
    static constexpr int BYTES = DATA_BYTES + SCALE_BYTES;
};

__host__ __device__ constexpr int rowStride(int columns) {
    return columns * 2 + kROW_PAD;
}

/// A group that the block has panels of.
struct BlockGroup {
    int expert;
    int first; ///< position
    int count;
    int row; ///< of a half; 0: the first of those that are there together
    float2 scales;
};

/// Activations in shared memory: two halves, which are filled in turn.
struct StreamRows {
    CopyBarrier loaded[2], used[2];
    int targets[2][kMOST_TOKENS]; ///< rows of y
};

/// Groups from `first` on that are in a half together: the number of the first that is not.
__device__ __forceinline__ int endOfHalf(BlockGroup const* groups, int first, int count) {
    int end = first + 1;
    while (end < count && groups[end].row > 0) {
        ++end;
    }
    return end;
}

/// Fill half after half, by one warp.
__device__ void loadRows(GemmProblem const& problem, StreamPlan const& plan, BlockGroup const* groups, int count,
                         uint8_t* halves, StreamRows& shared, int lane) {
    int const stride = rowStride(problem.columns), bytes = problem.columns * 2;
    for (int first = 0, turn = 0, end; first < count; first = end, ++turn) {
        end = endOfHalf(groups, first, count);
        int const half = turn % 2, used = groups[end - 1].row + groups[end - 1].count;
        if (turn >= 2) {
            shared.used[half].wait(turn / 2 - 1 & 1);
        }
        int64_t source = 0;
        if (lane < used) {
            int its = first;
            while (its + 1 < end && groups[its + 1].row <= lane) {
                ++its;
            }
            int const position = groups[its].first + lane - groups[its].row;
            source = problem.x_rows != nullptr ? __ldcg(problem.x_rows + position) : position;
            shared.targets[half][lane] = problem.y_rows != nullptr ? __ldcg(problem.y_rows + position) : position;
        }
        __syncwarp();
        if (lane == 0) {
            shared.loaded[half].expect(used * bytes);
        }
        if (lane < used) {
            shared.loaded[half].copy(halves + (half * plan.rows + lane) * stride, problem.x + source * bytes, bytes);
        }
    }
}

/// A warp's panels `begin`, begin + step, .. < end of all groups' panels, stage by stage through its ring.
template <int TILES>
class PanelStream {
  public:
    using Stage = StreamStage<TILES>;

    __device__ PanelStream(GemmProblem const& problem, BlockGroup const* groups, int firstGroup, uint8_t* ring,
                           CopyBarrier* filled, int stages, int lane)
        : mProblem(problem), mGroups(groups), mFirstGroup(firstGroup), mRing(ring), mFilled(filled), mStages(stages),
          mLane(lane), mPanelStages(problem.columns / (TILES * kTILE_COLUMNS)) {}

    /// Ask for as many stages as the ring holds.
    __device__ void start(int begin, int step, int end) {
        mItem = begin;
        mStep = step;
        mEnd = end;
        aim();
        for (int i = 0; i < mStages; ++i) {
            ask();
        }
    }

    /// Take the next stage's weights, and ask for another in its place.
    __device__ __forceinline__ void take(uint4 (&codes)[TILES], uint32_t (&scales)[TILES]) {
        mFilled[mSlot].wait(mParity);
        uint8_t const* const stage = mRing + mSlot * Stage::BYTES;
        uint32_t const shared = sharedAddress(stage) + mLane * 16;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            codes[i] = detail::loadShared16(shared + i * Stage::TILE_BYTES);
        }
        uint16_t const* const mine = reinterpret_cast<uint16_t const*>(stage + Stage::DATA_BYTES) + mLane * TILES;
        if constexpr (TILES == 4) {
            uint2 const four = *reinterpret_cast<uint2 const*>(mine);
            scales[0] = four.x;
            scales[1] = four.x >> 16;
            scales[2] = four.y;
            scales[3] = four.y >> 16;
        } else {
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                scales[i] = mine[i];
            }
        }
        fenceCopies();
        __syncwarp(); // all have read it
        ask();
        if (++mSlot == mStages) {
            mSlot = 0;
            mParity ^= 1;
        }
    }

  private:
    GemmProblem const& mProblem;
    BlockGroup const* mGroups;
    int mFirstGroup;
    uint8_t* mRing;
    CopyBarrier* mFilled;
    int mStages, mLane;
    int mPanelStages;
    int mSlot = 0;
    uint32_t mParity = 0;
    // What is asked for next.
    int mItem = 0, mStep = 0, mEnd = 0, mStage = 0, mAskSlot = 0;
    uint8_t const* mPanel = nullptr;

    __device__ __forceinline__ void aim() {
        if (mItem < mEnd) {
            int const group = mItem / mProblem.panels, panel = mItem - group * mProblem.panels;
            int const expert = __shfl_sync(0xFFFFFFFFu, mGroups[group - mFirstGroup].expert, 0);
            int64_t const row = int64_t{expert} * mProblem.panels + panel;
            mPanel = mProblem.weight + row * panelBytes(WeightFormat::kNVFP4, mProblem.columns);
        }
    }

    __device__ __forceinline__ void ask() {
        if (mItem >= mEnd) {
            return;
        }
        if (mLane == 0) {
            CopyBarrier& filled = mFilled[mAskSlot];
            uint8_t* const stage = mRing + mAskSlot * Stage::BYTES;
            filled.expect(Stage::BYTES);
            filled.copyOnce(stage, mPanel + mStage * Stage::DATA_BYTES, Stage::DATA_BYTES);
            filled.copyOnce(stage + Stage::DATA_BYTES, mPanel + 8 * mProblem.columns + mStage * Stage::SCALE_BYTES,
                            Stage::SCALE_BYTES);
        }
        mAskSlot = mAskSlot + 1 == mStages ? 0 : mAskSlot + 1;
        if (++mStage == mPanelStages) {
            mStage = 0;
            mItem += mStep;
            aim();
        }
    }
};

/// A panel times up to 8 STEPS tokens, whose rows of activations begin at `x` for this lane's chunk; see
/// multiplyOperands. Columns past the last token are not stored.
template <int STEPS, int TILES, typename Store, typename RowOf>
__device__ __forceinline__ void streamPanel(PanelStream<TILES>& weights, uint32_t x, int stride, int columns,
                                            Store const& store, RowOf const& rowOf) {
    uint32_t rows[STEPS];
#pragma unroll
    for (int n = 0; n < STEPS; ++n) {
        rows[n] = x + min(n * 8 + store.lane % 8, store.count - 1) * stride;
    }
    float acc[STEPS][4] = {};
    for (int tile = 0; tile < columns / kTILE_COLUMNS; tile += TILES) {
        uint4 codes[TILES];
        uint32_t scales[TILES];
        weights.take(codes, scales);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            uint32_t a[4][4];
            dequantize(codes[i], scales[i], a);
#pragma unroll
            for (int n = 0; n < STEPS; ++n) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t b[4];
                    ldmatrix4(b, rows[n] + (tile + i) * 128 + half * 64);
                    mma16816(acc[n], a[2 * half], b[0], b[1]);
                    mma16816(acc[n], a[2 * half + 1], b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < STEPS; ++n) {
        store.run(n, make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]), rowOf);
    }
}

/// Grid: a block a multiprocessor, or fewer. Dynamic shared memory: [warps][stages] weights, [2][rows] activations.
template <GemmEpilogue E, int TILES>
__global__ void __launch_bounds__((kMOST_WARPS + 1) * kWARP, 1)
    gemmStreamKernel(GemmProblem const __grid_constant__ problem, StreamPlan const plan) {
    using Stage = StreamStage<TILES>;
    extern __shared__ __align__(128) uint8_t buffer[];
    __shared__ BlockGroup groups[kMOST_GROUPS];
    __shared__ StreamRows rows;
    __shared__ CopyBarrier filled[kMOST_WARPS][kMOST_STAGES];
    int const thread = static_cast<int>(threadIdx.x), lane = thread % kWARP;
    int const warp = __shfl_sync(0xFFFFFFFFu, thread / kWARP, 0);
    bool const multiplies = warp < plan.warps;
    int const ringBytes = plan.stages * Stage::BYTES, stride = rowStride(problem.columns);
    uint8_t* const halves = buffer + plan.warps * ringBytes;
    if (lane == 0 && multiplies) {
        for (int stage = 0; stage < plan.stages; ++stage) {
            filled[warp][stage].open();
        }
    }
    if (thread < 2) {
        rows.loaded[thread].open();
        rows.used[thread].open(plan.warps);
    }
    if (problem.ready == GemmReady::kNothing) {
        waitForPredecessor();
    }
    int64_t const items = int64_t{__ldcg(problem.group_count)} * problem.panels;
    int const begin = static_cast<int>(items * blockIdx.x / gridDim.x);
    int const end = static_cast<int>(items * (blockIdx.x + 1) / gridDim.x);
    int const firstGroup = begin / problem.panels;
    int const count = begin < end ? (end - 1) / problem.panels - firstGroup + 1 : 0;
    if (thread < count) {
        int4 const entry = __ldcg(reinterpret_cast<int4 const*>(problem.groups + firstGroup + thread));
        groups[thread] = {entry.x, entry.y, entry.z, 0, {}};
    }
    __syncthreads();
    PanelStream<TILES> weights(problem, groups, firstGroup, buffer + warp * ringBytes, filled[warp], plan.stages, lane);
    if (multiplies) {
        weights.start(begin + warp, plan.warps, end);
    } else {
        if (lane < count) {
            groups[lane].scales = panelScales<E>(problem, groups[lane].expert, 0);
        }
        if (lane == 0) {
            for (int group = 0, row = 0; group < count; ++group) {
                row = row + groups[group].count > plan.rows ? 0 : row;
                groups[group].row = row;
                row += groups[group].count;
            }
        }
    }
    allowSuccessor();
    __syncthreads();
    if (!multiplies) {
        if (problem.ready == GemmReady::kWeights) {
            waitForPredecessor();
        }
        loadRows(problem, plan, groups, count, halves, rows, lane);
        if (problem.ready == GemmReady::kAll) {
            waitForPredecessor(); // this kernel's end tells that the one before it has ended, too
        }
        return;
    }

    int item = begin + warp;
    int group = 0, panel = item - firstGroup * problem.panels;
    for (int first = 0, turn = 0, next; first < count; first = next, ++turn) {
        next = endOfHalf(groups, first, count);
        int const half = turn % 2;
        rows.loaded[half].wait(turn / 2 & 1);
        for (; item < end; item += plan.warps, panel += plan.warps) {
            for (; panel >= problem.panels; panel -= problem.panels) {
                ++group;
            }
            if (group >= next) {
                break;
            }
            BlockGroup const& its = groups[group];
            uint32_t const x = sharedAddress(halves) + (half * plan.rows + its.row) * stride + lane / 8 * 16;
            PanelStore<WeightFormat::kNVFP4, E> const store(problem, panel, its.count, its.scales, lane);
            auto const rowOf = [&](int token) {
                return rows.targets[half][its.row + token];
            };
            if (its.count <= 8) {
                streamPanel<1>(weights, x, stride, problem.columns, store, rowOf);
            } else {
                streamPanel<2>(weights, x, stride, problem.columns, store, rowOf);
            }
        }
        __syncwarp();
        if (lane == 0) {
            rows.used[half].arrive();
        }
    }
}

/// As many warps as there are rings for; false if too few, or where a block might have panels of too many groups.
bool makePlan(int columns, int tokens, int64_t maxGroups, GemmDevice const& device, StreamPlan& plan) {
    int const stage = scaleGroup(columns / kTILE_COLUMNS) * StreamStage<1>::BYTES;
    int const room = device.shared_bytes - kSTATIC_SHARED_BYTES - 2 * tokens * rowStride(columns);
    int const rings = room / (kLEAST_STAGES * stage);
    if (tokens > kMOST_TOKENS || room < 0 || rings < kLEAST_WARPS || maxGroups / device.processors + 2 > kMOST_GROUPS) {
        return false;
    }
    plan.warps = std::min(rings, kMOST_WARPS);
    plan.stages = std::min(room / (plan.warps * stage), kMOST_STAGES);
    plan.rows = tokens;
    return true;
}

template <GemmEpilogue E, int TILES>
cudaError_t launchTiles(GemmProblem const& problem, StreamPlan const& plan, int64_t maxGroups, GemmDevice const& device,
                        cudaStream_t stream) {
    auto const kernel = gemmStreamKernel<E, TILES>;
    int const bytes = plan.warps * plan.stages * StreamStage<TILES>::BYTES + 2 * plan.rows * rowStride(problem.columns);
    if (cudaError_t const status = allowShared(kernel, bytes); status != cudaSuccess) {
        return status;
    }
    int64_t const grid = std::min<int64_t>(maxGroups * problem.panels, device.processors);
    return launchOverlapped(kernel, dim3(static_cast<unsigned>(grid)), dim3((plan.warps + 1) * kWARP), bytes, stream,
                            problem, plan);
}

template <GemmEpilogue E>
cudaError_t launchEpilogue(GemmProblem const& problem, StreamPlan const& plan, int64_t maxGroups,
                           GemmDevice const& device, cudaStream_t stream) {
    switch (scaleGroup(problem.columns / kTILE_COLUMNS)) {
    case 4:
        return launchTiles<E, 4>(problem, plan, maxGroups, device, stream);
    case 2:
        return launchTiles<E, 2>(problem, plan, maxGroups, device, stream);
    default:
        return launchTiles<E, 1>(problem, plan, maxGroups, device, stream);
    }
}

} // namespace

bool gemmStreamFits(int64_t columns, int tokens, int64_t maxGroups, GemmDevice const& device) {
    StreamPlan plan;
    return makePlan(static_cast<int>(columns), tokens, maxGroups, device, plan);
}

cudaError_t launchGemmStream(GemmProblem const& problem, GemmEpilogue epilogue, int tokens, int64_t maxGroups,
                             GemmDevice const& device, cudaStream_t stream) {
    StreamPlan plan;
    if (!makePlan(problem.columns, tokens, maxGroups, device, plan)) {
        return cudaErrorInvalidValue;
    }
    return epilogue == GemmEpilogue::kSwiGlu
               ? launchEpilogue<GemmEpilogue::kSwiGlu>(problem, plan, maxGroups, device, stream)
               : launchEpilogue<GemmEpilogue::kStore>(problem, plan, maxGroups, device, stream);
}

} // namespace flint
