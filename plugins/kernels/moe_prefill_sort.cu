// A counting sort: histograms per block of pairs, one block that turns them into starts, and a stable scatter.
#include "kernels/moe_prefill_sort.h"

#include "kernels/block_scan.cuh"
#include "kernels/launch.h"

namespace flint {

namespace {

constexpr int kWARPS = kSORT_PAIRS / kWARP;

/// counts[block][expert]: pairs of the block that chose the expert.
__global__ void __launch_bounds__(kSORT_PAIRS) moeCountKernel(MoeSortParams params) {
    waitForPredecessor();
    allowSuccessor();
    __shared__ int32_t counts[kSORT_EXPERTS];
    int const thread = static_cast<int>(threadIdx.x);
    if (thread < params.num_experts) {
        counts[thread] = 0;
    }
    __syncthreads();
    int const pair = static_cast<int>(blockIdx.x) * kSORT_PAIRS + thread;
    if (pair < params.pair_count) {
        atomicAdd(counts + params.experts[pair], 1); // of integers: the order does not matter
    }
    __syncthreads();
    if (thread < params.num_experts) {
        params.counts[blockIdx.x * params.num_experts + thread] = counts[thread];
    }
}

/// One block, a thread per expert: starts, each block's counts turned into offsets within the expert, groups.
__global__ void __launch_bounds__(kSORT_EXPERTS) moePlanKernel(MoeSortParams params, int blocks) {
    waitForPredecessor();
    allowSuccessor();
    __shared__ int sums[kSORT_EXPERTS / kWARP];
    int const expert = static_cast<int>(threadIdx.x);
    bool const real = expert < params.num_experts;
    int total = 0;
    if (real) {
        int32_t* const counts = params.counts + expert;
        constexpr int BATCH = 16; // loads under way together
        for (int first = 0; first < blocks; first += BATCH) {
            int count[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                count[i] = first + i < blocks ? counts[(first + i) * params.num_experts] : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (first + i < blocks) {
                    counts[(first + i) * params.num_experts] = total;
                }
                total += count[i];
            }
        }
    }
    int const start = blockScan(total, sums) - total;
    int const groups = (total + params.group_size - 1) / params.group_size;
    int const lastGroup = blockScan(groups, sums);
    if (real) {
        params.starts[expert] = start;
        GemmGroup* const out = params.groups + lastGroup - groups;
        for (int i = 0; i < groups; ++i) {
            int const first = i * params.group_size;
            out[i] = {expert, start + first, min(params.group_size, total - first), 0};
        }
    }
    if (threadIdx.x == blockDim.x - 1) {
        *params.group_count = lastGroup;
    }
}

/// Dynamic shared memory: uint16 [warps][experts].
__global__ void __launch_bounds__(kSORT_PAIRS) moeScatterKernel(MoeSortParams params) {
    waitForPredecessor();
    allowSuccessor();
    extern __shared__ uint16_t counts[];
    int const thread = static_cast<int>(threadIdx.x), lane = thread % kWARP, warp = thread / kWARP;
    int const experts = params.num_experts;
    for (int i = thread; i < kWARPS * experts; i += kSORT_PAIRS) {
        counts[i] = 0;
    }
    int const pair = static_cast<int>(blockIdx.x) * kSORT_PAIRS + thread;
    bool const real = pair < params.pair_count;
    int const expert = real ? params.experts[pair] : -1;
    unsigned const same = __match_any_sync(0xFFFFFFFFu, expert);
    int const rank = __popc(same & ((1u << lane) - 1));
    __syncthreads();
    if (real && rank == 0) {
        counts[warp * experts + expert] = static_cast<uint16_t>(__popc(same));
    }
    __syncthreads();
    if (thread < experts) {
        int before = 0;
        for (int i = 0; i < kWARPS; ++i) {
            int const count = counts[i * experts + thread];
            counts[i * experts + thread] = static_cast<uint16_t>(before);
            before += count;
        }
    }
    __syncthreads();
    if (real) {
        int const position = params.starts[expert] + params.counts[blockIdx.x * experts + expert] +
                             counts[warp * experts + expert] + rank;
        params.tokens[position] = pair / params.top_k;
        params.pairs[position] = pair;
    }
}

} // namespace

cudaError_t launchMoeSort(MoeSortParams const& params, cudaStream_t stream) {
    if (params.num_experts < 1 || params.num_experts > kSORT_EXPERTS) {
        return cudaErrorInvalidValue;
    }
    int const blocks = (params.pair_count + kSORT_PAIRS - 1) / kSORT_PAIRS;
    dim3 const grid(static_cast<unsigned>(blocks));
    cudaError_t status = launchOverlapped(moeCountKernel, grid, dim3(kSORT_PAIRS), 0, stream, params);
    if (status == cudaSuccess) {
        unsigned const threads = (params.num_experts + kWARP - 1) / kWARP * kWARP;
        status = launchOverlapped(moePlanKernel, dim3(1), dim3(threads), 0, stream, params, blocks);
    }
    if (status == cudaSuccess) {
        size_t const sharedBytes = sizeof(uint16_t) * kWARPS * params.num_experts;
        status = launchOverlapped(moeScatterKernel, grid, dim3(kSORT_PAIRS), sharedBytes, stream, params);
    }
    return status;
}

} // namespace flint
