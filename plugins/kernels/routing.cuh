// The router's choice: top-6 by logit, ties to the lowest index; score = 1 / (1 + exp(-logit)), renormalised to sum 1.
#pragma once

#include "kernels/device.cuh"
#include "kernels/moe.h"

namespace flint {

struct Routes {
    int expert[kTOP_K];   ///< by descending logit
    float weight[kTOP_K]; ///< FP32
};

namespace detail {

/// Unsigned integers in the order of floats.
__device__ __forceinline__ uint32_t orderedKey(float x) {
    uint32_t const bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float fromKey(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

} // namespace detail

/// The logits of one token in a warp: lane l holds experts 32i + l, as keys in the order of floats.
template <int E>
struct RouterKeys {
    static constexpr int kOWN = (E + kWARP - 1) / kWARP;
    uint32_t keys[kOWN];

    /// `logits` [E] f32 in global memory, read past L1.
    __device__ __forceinline__ void load(float const* logits, int lane) {
#pragma unroll
        for (int i = 0; i < kOWN; ++i) {
            int const expert = i * kWARP + lane;
            keys[i] = expert < E ? detail::orderedKey(__ldcg(logits + expert)) : 0;
        }
    }

    /// Take the expert with the largest logit away, ties to the lowest index; every lane gets it and its key.
    __device__ __forceinline__ int takeBest(int lane, uint32_t& top) {
        uint32_t best = 0;
        int place = 0;
#pragma unroll
        for (int i = 0; i < kOWN; ++i) {
            if (keys[i] > best) {
                best = keys[i];
                place = i;
            }
        }
        top = __reduce_max_sync(0xFFFFFFFFu, best);
        unsigned const mine = best == top ? place * kWARP + lane : 0xFFFFFFFFu;
        unsigned const chosen = __reduce_min_sync(0xFFFFFFFFu, mine);
#pragma unroll
        for (int i = 0; i < kOWN; ++i) {
            if (chosen == static_cast<unsigned>(i * kWARP + lane)) {
                keys[i] = 0;
            }
        }
        // A NaN's key is the largest, or, if all its bits are ones, 0 like a taken expert's: then expert 0 may come
        // several times. In range in any case, and the weights will be NaN.
        return static_cast<int>(min(chosen, unsigned{E - 1}));
    }
};

/// Route one token by one warp; every lane gets the result.
template <int E>
__device__ __forceinline__ Routes routeToken(RouterKeys<E> keys, int lane) {
    Routes routes;
    float total = 0;
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        uint32_t top;
        routes.expert[slot] = keys.takeBest(lane, top);
        routes.weight[slot] = 1.0f / (1.0f + expf(-detail::fromKey(top)));
        total += routes.weight[slot];
    }
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        routes.weight[slot] /= total;
    }
    return routes;
}

template <int E>
__device__ __forceinline__ Routes routeToken(float const* logits, int lane) {
    RouterKeys<E> keys;
    keys.load(logits, lane);
    return routeToken<E>(keys, lane);
}

/// The routing of a step of up to TOKENS tokens. A pair is token * kTOP_K + slot.
template <int TOKENS>
struct StepRoutes {
    static constexpr int kPAIRS = TOKENS * kTOP_K;
    int expert[kPAIRS];
    float weight[kPAIRS];
    int distinct[kPAIRS];             ///< experts, each once, by first appearance
    signed char pair[kPAIRS][TOKENS]; ///< of a distinct expert: the pair by which a token chose it, or -1
    int count;                        ///< of distinct experts
};

/// Route up to TOKENS tokens into shared memory, by a whole block of at least as many warps, whose i-th has token i's
/// `keys`. `first` is scratch. Ends with a barrier.
template <int E, int TOKENS>
__device__ __forceinline__ void routeStep(RouterKeys<E> const& keys, int tokens, StepRoutes<TOKENS>& routes,
                                          int (&first)[E]) {
    constexpr int PAIRS = StepRoutes<TOKENS>::kPAIRS;
    static_assert(PAIRS > kWARP && PAIRS <= 2 * kWARP);
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP, pairs = tokens * kTOP_K;
    for (int i = threadIdx.x; i < E; i += blockDim.x) {
        first[i] = PAIRS;
    }
    for (int i = threadIdx.x; i < PAIRS * TOKENS; i += blockDim.x) {
        routes.pair[i / TOKENS][i % TOKENS] = -1;
    }
    __syncthreads();
    if (warp < tokens) {
        Routes const mine = routeToken<E>(keys, lane);
#pragma unroll
        for (int slot = 0; slot < kTOP_K; ++slot) {
            if (lane == slot) {
                routes.expert[warp * kTOP_K + slot] = mine.expert[slot];
                routes.weight[warp * kTOP_K + slot] = mine.weight[slot];
                atomicMin(&first[mine.expert[slot]], warp * kTOP_K + slot);
            }
        }
    }
    __syncthreads();
    if (warp == 0) {
        int const low = lane, high = lane + kWARP;
        int const lowExpert = low < pairs ? routes.expert[low] : 0;
        int const highExpert = high < pairs ? routes.expert[high] : 0;
        bool const lowFirst = low < pairs && first[lowExpert] == low;
        bool const highFirst = high < pairs && first[highExpert] == high;
        unsigned const lows = __ballot_sync(0xFFFFFFFFu, lowFirst), highs = __ballot_sync(0xFFFFFFFFu, highFirst);
        unsigned const before = (1u << lane) - 1;
        int const lowIndex = __popc(lows & before), highIndex = __popc(lows) + __popc(highs & before);
        __syncwarp();
        // From here on `first` is an expert's index among the distinct ones.
        if (lowFirst) {
            routes.distinct[lowIndex] = lowExpert;
            first[lowExpert] = lowIndex;
        }
        if (highFirst) {
            routes.distinct[highIndex] = highExpert;
            first[highExpert] = highIndex;
        }
        if (lane == 0) {
            routes.count = __popc(lows) + __popc(highs);
        }
        __syncwarp();
        if (low < pairs) {
            routes.pair[first[lowExpert]][low / kTOP_K] = static_cast<signed char>(low);
        }
        if (high < pairs) {
            routes.pair[first[highExpert]][high / kTOP_K] = static_cast<signed char>(high);
        }
    }
    __syncthreads();
}

/// Copy a routing between global and shared memory, by a whole block. Reads are volatile: past L1.
template <int TOKENS>
__device__ __forceinline__ void copyRoutes(StepRoutes<TOKENS>& target, StepRoutes<TOKENS> const& source) {
    static_assert(sizeof(StepRoutes<TOKENS>) % sizeof(int) == 0);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(StepRoutes<TOKENS>) / sizeof(int)); i += blockDim.x) {
        reinterpret_cast<int*>(&target)[i] = reinterpret_cast<int const volatile*>(&source)[i];
    }
}

} // namespace flint
