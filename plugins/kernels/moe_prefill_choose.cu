// Choice of experts and order of pairs for up to kSPLIT_TOKENS tokens. In kernels of their own choice, count, plan and
// scatter would each do less than a launch takes. A single block would be as slow, routing 64 tokens: a cluster does
// that, and sends what it chose to its first block.
#include "kernels/block_scan.cuh"
#include "kernels/cluster.cuh"
#include "kernels/gemm.h"
#include "kernels/launch.h"
#include "kernels/moe_prefill_sort.h"
#include "kernels/routing.cuh"

namespace flint {

namespace {

constexpr int kWARPS = 8; ///< of a block; each routes a token
constexpr int kTHREADS = kWARPS * kWARP;
constexpr int kPAIRS = kSPLIT_TOKENS * kTOP_K;
constexpr int kWORDS = kPAIRS / kWARP;
static_assert(kPAIRS % kWARP == 0 && kSPLIT_TOKENS <= 8 * kWARPS);

/// Grid (ceil(T / warps)), one cluster, of two blocks at least. A pair is token * kTOP_K + slot.
template <int E>
__global__ void __launch_bounds__(kTHREADS)
    moeChooseKernel(RouterChoiceParams const choice, MoeSortParams const params) {
    static_assert(E <= kTHREADS);
    __shared__ int experts[kPAIRS];
    __shared__ uint32_t chosen[kWORDS][E]; ///< bit i of word w: pair 32 w + i chose the expert
    __shared__ int positions[kWORDS][E];   ///< of the first of them
    __shared__ int sums[kWARPS];
    int const thread = static_cast<int>(threadIdx.x), lane = thread % kWARP, warp = thread / kWARP;
    int const rank = clusterRank(), token = rank * kWARPS + warp;
    arriveCluster();
    if (rank == 0) {
        for (int i = thread; i < kWORDS * E; i += kTHREADS) {
            chosen[i / E][i % E] = 0;
        }
    }
    waitForPredecessor();
    allowSuccessor(); // after the wait: what this kernel's predecessor wrote is complete for its successor
    Routes routes{};
    bool const live = token < choice.tokens;
    if (live) {
        routes = routeToken<E>(choice.logits + int64_t{token} * E, lane);
    }
    waitCluster(); // the first block runs and can receive
    if (live) {
#pragma unroll
        for (int slot = 0; slot < kTOP_K; ++slot) {
            if (lane == slot) {
                int const pair = token * kTOP_K + slot;
                send(peerAddress(experts + pair, 0), routes.expert[slot]);
                choice.weights[pair] = routes.weight[slot];
            }
        }
    }
    releaseCluster();
    waitCluster();
    if (rank > 0) {
        return;
    }

    for (int pair = thread; pair < params.pair_count; pair += kTHREADS) {
        atomicOr(&chosen[pair / kWARP][experts[pair]], 1u << pair % kWARP);
    }
    __syncthreads();
    int const expert = thread;
    int counts[kWORDS], total = 0;
#pragma unroll
    for (int word = 0; word < kWORDS; ++word) {
        counts[word] = expert < E ? __popc(chosen[word][expert]) : 0;
        total += counts[word];
    }
    // Pairs and groups in one sum: neither reaches 2^16.
    int const groups = (total + params.group_size - 1) / params.group_size;
    int const mine = groups << 16 | total, end = blockScan(mine, sums), before = end - mine;
    int position = before & 0xFFFF;
    GemmGroup* const out = params.groups + (before >> 16);
    for (int i = 0; i < groups; ++i) {
        int const first = i * params.group_size;
        out[i] = {expert, position + first, min(params.group_size, total - first), 0};
    }
    if (thread == kTHREADS - 1) {
        *params.group_count = end >> 16;
    }
    if (expert < E) {
#pragma unroll
        for (int word = 0; word < kWORDS; ++word) {
            positions[word][expert] = position;
            position += counts[word];
        }
    }
    __syncthreads();
    for (int pair = thread; pair < params.pair_count; pair += kTHREADS) {
        int const word = pair / kWARP, its = experts[pair];
        unsigned const earlier = chosen[word][its] & ((1u << pair % kWARP) - 1);
        int const place = positions[word][its] + __popc(earlier);
        params.tokens[place] = pair / kTOP_K;
        params.pairs[place] = pair;
    }
}

template <int E>
cudaError_t launchInstance(RouterChoiceParams const& choice, MoeSortParams const& params, cudaStream_t stream) {
    unsigned const blocks = (choice.tokens + kWARPS - 1) / kWARPS;
    return launchCluster(moeChooseKernel<E>, dim3(blocks), dim3(kTHREADS), blocks, 0, stream, choice, params);
}

} // namespace

cudaError_t launchMoeChoose(RouterChoiceParams const& choice, MoeSortParams const& params, cudaStream_t stream) {
    if (choice.tokens <= kWARPS || choice.tokens > kSPLIT_TOKENS || params.pair_count != choice.tokens * kTOP_K ||
        params.num_experts != choice.experts_count) {
        return cudaErrorInvalidValue;
    }
    switch (choice.experts_count) {
    case 256:
        return launchInstance<256>(choice, params, stream);
    case 16:
        return launchInstance<16>(choice, params, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace flint
