#include "kernels/sample.h"

#include "kernels/launch.h"
#include "kernels/sample/draw.cuh"
#include "kernels/sample/philox.cuh"
#include "kernels/sample/row.cuh"
#include "kernels/sample/select.cuh"
#include "kernels/sample/wide.cuh"

#include <cmath>

namespace flint {

namespace {

using namespace sample;

constexpr int kGROUP_WARPS = 8;                       // Warps of a block of sampleGroupsKernel.
constexpr int64_t kMAX_VOCABULARY = int64_t{1} << 21; // 32 threads of sampleDrawKernel list kLISTED_GROUPS at most.

union DrawKernelShared {
    struct {
        SelectShared select;
        DrawShared draw;
    };
    WideShared wide;
};

/// The maximum of a group of which each lane has four logits, if it `found` some; NaN if one is not finite, or, of
/// adjusted ones, NaN.
template <bool Adjusted>
__device__ __forceinline__ float groupMax(float const (&l)[4], bool found) {
    bool good = true;
    uint32_t order = 0;
    if (found) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            good &= Adjusted ? !isnan(l[i]) : isFinite(l[i]);
            order = max(order, orderOf(l[i]));
        }
    }
    good = __all_sync(kALL, good);
    order = __reduce_max_sync(kALL, order);
    return good ? valueOf(order) : NAN;
}

/// Grid (ceil(groups / (kGROUP_WARPS * PerWarp)), R): each warp reduces `PerWarp` groups of a row.
template <int PerWarp>
__global__ void __launch_bounds__(kGROUP_WARPS* kWARP)
    sampleGroupsKernel(SampleParams const __grid_constant__ params, Groups const __grid_constant__ groups) {
    waitForPredecessor();
    allowSuccessor();
    int const lane = threadIdx.x % kWARP, row = blockIdx.y;
    int const first = (blockIdx.x * kGROUP_WARPS + threadIdx.x / kWARP) * PerWarp;
    if (blockIdx.x == 0 && row == 0 && threadIdx.x == 0) {
        *groups.rowsDone = 0;
    }
    Row const source = rowOf(params, row);
    float l[PerWarp][4];
    bool found[PerWarp];
#pragma unroll
    for (int n = 0; n < PerWarp; ++n) {
        found[n] = source.load<false>(first + n, lane, l[n]);
    }
#pragma unroll
    for (int n = 0; n < PerWarp; ++n) {
        int const group = first + n;
        if (group >= groups.groups) {
            return;
        }
        int64_t const place = static_cast<int64_t>(row) * groups.groups + group;
        float const maximum = groupMax<false>(l[n], found[n]);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum += found[n] ? __expf(l[n][i] - maximum) : 0.0f;
        }
        sum = warpSum(sum);
        if (lane == 0) {
            groups.raw[place] = make_float2(maximum, sum);
        }
        if (source.adjusted) {
            float adjusted[4];
            source.load<true>(group, lane, adjusted);
            float const adjustedMax = groupMax<true>(adjusted, found[n]);
            if (lane == 0) {
                groups.adjustedMax[place] = adjustedMax;
            }
        }
    }
}

/// log-softmax is (l - maximum) - logSum.
struct LogSoftmax {
    float maximum, logSum;

    __device__ float operator()(float l) const { return (l - maximum) - logSum; }
};

/// Combine the groups of a row; returns whether all its logits are finite.
__device__ bool combineGroups(float2 const* raw, int groups, LogSoftmax& result, SelectShared& shared) {
    uint32_t order = 0;
    bool finite = true;
    for (int group = threadIdx.x; group < groups; group += kTHREADS) {
        float const maximum = raw[group].x;
        finite &= isFinite(maximum);
        order = max(order, orderOf(maximum));
    }
    finite = __syncthreads_and(finite);
    result.maximum = valueOf(blockMax(order, shared.reduce[0]));
    float sum = 0;
    for (int group = threadIdx.x; group < groups; group += kTHREADS) {
        float2 const both = raw[group];
        sum += both.y * __expf(both.x - result.maximum);
    }
    result.logSum = logf(blockSum(sum, reinterpret_cast<float*>(shared.reduce[1])));
    return finite;
}

/// Whether a token can be drawn from a row's adjusted logits: none is NaN, as a bias or penalty that is NaN makes them,
/// and not every token is forbidden.
__device__ bool canDraw(float const* adjustedMax, int groups) {
    bool good = true, allowed = false;
    for (int group = threadIdx.x; group < groups; group += kTHREADS) {
        good &= !isnan(adjustedMax[group]);
        allowed |= adjustedMax[group] > -INFINITY;
    }
    return __syncthreads_and(good) && __syncthreads_or(allowed);
}

/// Count and keep the drawn tokens once every row has its token: rows that share a slot all see the states from before
/// the step. Called by one block per row, which has written the row's token.
__device__ void recordTokens(SampleParams const& params, Groups const& groups) {
    __syncthreads();
    bool last = params.rows == 1;
    if (!last && threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(groups.rowsDone, 1) == params.rows - 1;
        __threadfence();
    }
    if (!__syncthreads_or(last)) {
        return;
    }
    for (int64_t row = threadIdx.x; row < params.rows; row += kTHREADS) {
        int const token = __ldcg(params.tokens + row), slot = slotOf(params, row);
        if (token >= 0 && slot >= 0) {
            atomicAdd(params.token_counts + slot * params.vocabulary + token, 1);
        }
    }
    // One warp, and a warp's rows at a time, so that the last of the rows that share a slot is the one that stays.
    if (threadIdx.x / kWARP != kWARPS - 1) {
        return;
    }
    int const lane = threadIdx.x % kWARP;
    for (int64_t first = 0; first < params.rows; first += kWARP) {
        int64_t const row = first + lane;
        int const slot = row < params.rows ? slotOf(params, row) : -1;
        int const keeps = kWARP - 1 - __clz(static_cast<int>(__match_any_sync(kALL, slot)));
        if (slot >= 0 && slot < params.slots && lane == keeps) {
            params.last_tokens[slot] = __ldcg(params.tokens + row);
        }
        __syncwarp();
    }
}

/// Grid (ranks * R), clusters of `ranks`. Rank 0 does all of a row that has a short list; the others help if it has
/// none.
__global__ void __launch_bounds__(kTHREADS, 1) // two blocks' registers would not do without spills
    sampleDrawKernel(SampleParams const __grid_constant__ params, Groups const __grid_constant__ groups, int ranks) {
    __shared__ DrawKernelShared shared;
    __shared__ Row source;
    __shared__ Draw draw;
    __shared__ LogSoftmax logSoftmax;
    waitForPredecessor();
    allowSuccessor();
    int const row = blockIdx.x / ranks, rank = blockIdx.x % ranks, self = threadIdx.x;
    int64_t const firstGroup = static_cast<int64_t>(row) * groups.groups;
    float2 const* const raw = groups.raw + firstGroup;
    // All loads come before anything that depends on one, so that their latency is paid once.
    Row const ownSource = rowOf(params, row);
    Draw ownDraw;
    ownDraw.temperature = params.temperature[row];
    ownDraw.topP = params.top_p[row];
    float const minP = params.min_p[row];
    int topK = params.top_k[row];
    uint32_t const drawIndex = params.draw_index[row], seed0 = params.seed[2 * row], seed1 = params.seed[2 * row + 1];
    LogSoftmax ownLogSoftmax;
    bool finite = combineGroups(raw, groups.groups, ownLogSoftmax, shared.select);
    if (self == 0) { // Kept here, as all threads need them, but not often enough to spend registers.
        ownDraw.minWeight = minP > 0.0f ? fminf(minP, 1.0f) * 0x1p40f : 0.0f;
        ownDraw.random = philox4x32(drawIndex, seed0, seed1);
        source = ownSource;
        draw = ownDraw;
        logSoftmax = ownLogSoftmax;
    }
    __syncthreads();

    topK = topK > 0 && topK < source.vocabulary ? topK : 0;
    bool const greedy = source.forced >= 0 || !(draw.temperature > 0.0f);
    bool wide = !greedy && (topK == 0 || topK > kLIMITED);
    if (rank != 0 && !wide) {
        return;
    }
    bool const neutral = !source.adjusted;
    float const* const maxima = neutral ? &raw->x : groups.adjustedMax + firstGroup;
    int const stride = neutral ? 2 : 1;
    finite = finite && source.valid && (neutral || canDraw(maxima, groups.groups));
    int token = kNO_TOKEN;
    if (finite && rank == 0) {
        int const needed = greedy ? 1 : topK;
        int const wanted = neutral && !wide ? max(kTOP, needed) : kTOP;
        SelectShared& select = shared.select;
        int found = selectBest<false>(source, &raw->x, 2, groups.groups, wanted, Ties::kALL, select);
        bool tied = found == kTOO_MANY;
        if (tied) {
            selectBest<false>(source, &raw->x, 2, groups.groups, kTOP, Ties::kLOWEST, select);
        }
        if (self < kTOP) {
            uint64_t const key = select.sorted[self];
            params.top_tokens[row * kTOP + self] = indexOfKey(key);
            params.top_logprobs[row * kTOP + self] = logSoftmax(valueOf(orderOfKey(key)));
        }
        if (!wide) {
            if (!neutral) {
                __syncthreads();
                Ties const ties = greedy ? Ties::kLOWEST : Ties::kALL;
                found = selectBest<true>(source, maxima, stride, groups.groups, needed, ties, select);
                tied = found == kTOO_MANY;
            }
            if (greedy) {
                token = source.forced >= 0 ? source.forced : indexOfKey(select.sorted[0]);
            } else if (!tied) {
                token = drawFromList(select.sorted, found, topK, draw, shared.draw);
            } else {
                wide = true;
                ranks = 1;
            }
        }
    }
    if (finite && wide) {
        __syncthreads();
        token = drawWide(source, maxima, stride, groups.groups, topK, draw, rank, ranks, shared.wide);
    }
    if (rank != 0) {
        return;
    }
    if (self < kTOP && !finite) {
        params.top_tokens[row * kTOP + self] = kNO_TOKEN;
        params.top_logprobs[row * kTOP + self] = NAN;
    }
    if (self == 0) {
        params.tokens[row] = token;
        params.logprobs[row] = finite ? logSoftmax(source.logits[token]) : NAN;
    }
    recordTokens(params, groups);
}

/// Blocks that share a row which needs a scan. Results do not depend on it, only how many SMs work on few rows.
int clusterSize(int64_t rows) {
    return rows <= 16 ? 8 : rows <= 32 ? 4 : rows <= 64 ? 2 : 1;
}

size_t roundUp(size_t bytes) {
    return (bytes + 15) / 16 * 16;
}

int64_t groupsOf(int64_t vocabulary) {
    return (vocabulary + kGROUP - 1) / kGROUP;
}

template <int PerWarp>
cudaError_t launchGroups(SampleParams const& params, Groups const& groups, cudaStream_t stream) {
    constexpr int kPER_BLOCK = kGROUP_WARPS * PerWarp;
    dim3 const grid((groups.groups + kPER_BLOCK - 1) / kPER_BLOCK, static_cast<unsigned>(params.rows));
    return launchOverlapped(sampleGroupsKernel<PerWarp>, grid, dim3(kGROUP_WARPS * kWARP), 0, stream, params, groups);
}

cudaError_t launchDraw(SampleParams const& params, Groups const& groups, cudaStream_t stream) {
    int const ranks = clusterSize(params.rows);
    dim3 const grid(static_cast<unsigned>(params.rows * ranks));
    return launchCluster(sampleDrawKernel, grid, dim3(kTHREADS), ranks, 0, stream, params, groups, ranks);
}

} // namespace

size_t sampleWorkspaceBytes(int64_t rows, int64_t vocabulary) {
    size_t const entries = static_cast<size_t>(rows * groupsOf(vocabulary));
    return roundUp(sizeof(uint32_t)) + roundUp(entries * sizeof(float2)) + entries * sizeof(float);
}

cudaError_t launchSample(SampleParams const& params, cudaStream_t stream) {
    if (params.vocabulary < kTOP || params.vocabulary > kMAX_VOCABULARY || params.vocabulary % kMASK_TOKENS != 0) {
        return cudaErrorInvalidValue;
    }
    if (params.rows == 0) {
        return cudaSuccess;
    }
    Groups groups;
    groups.groups = static_cast<int>(groupsOf(params.vocabulary));
    size_t const entries = static_cast<size_t>(params.rows * groups.groups);
    auto* const bytes = static_cast<char*>(params.workspace);
    groups.rowsDone = reinterpret_cast<uint32_t*>(bytes);
    groups.raw = reinterpret_cast<float2*>(bytes + roundUp(sizeof(uint32_t)));
    groups.adjustedMax =
        reinterpret_cast<float*>(bytes + roundUp(sizeof(uint32_t)) + roundUp(entries * sizeof(float2)));
    // Enough blocks to fill a GPU with few rows, enough loads in flight per warp with many; the same bits either way.
    cudaError_t const status =
        params.rows < 8 ? launchGroups<1>(params, groups, stream) : launchGroups<4>(params, groups, stream);
    return status != cudaSuccess ? status : launchDraw(params, groups, stream);
}

} // namespace flint
