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

/// Unsigned integers in the order of floats; of a NaN the largest, of no float 0.
__device__ __forceinline__ uint32_t orderedKey(float x) {
    uint32_t const bits = __float_as_uint(x);
    uint32_t const key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return x != x ? 0xFFFFFFFFu : key;
}

__device__ __forceinline__ float fromKey(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

/// N <= 4 keys in descending order, equal ones in the order they came in.
template <int N>
struct SortedKeys {
    uint32_t keys[N];
    uint32_t places = 0x03020100; ///< byte i: where keys[i] came in

    /// Sort `keys`: only neighbours change places, so that equal ones stay in order.
    __device__ __forceinline__ void sort() {
#pragma unroll
        for (int round = 0; round < N; ++round) {
#pragma unroll
            for (int i = round % 2; i + 1 < N; i += 2) {
                uint32_t const first = keys[i], second = keys[i + 1];
                keys[i] = max(first, second);
                keys[i + 1] = min(first, second);
                uint32_t const swapped = __byte_perm(places, 0, i == 0 ? 0x3201 : i == 1 ? 0x3120 : 0x2310);
                places = second > first ? swapped : places;
            }
        }
    }

    /// Take the first one away; 0 comes in at the end.
    __device__ __forceinline__ void pop() {
#pragma unroll
        for (int i = 0; i + 1 < N; ++i) {
            keys[i] = keys[i + 1];
        }
        keys[N - 1] = 0;
        places >>= 8;
    }
};

} // namespace detail

/// The logits of one token in a warp: a lane holds consecutive experts, in kLISTS lists of kTOGETHER.
template <int E>
struct RouterLogits {
    static constexpr int kTOGETHER = E % (4 * kWARP) == 0 ? 4 : 1;
    static constexpr int kLISTS = (E + kTOGETHER * kWARP - 1) / (kTOGETHER * kWARP);
    float values[kLISTS][kTOGETHER];

    static __device__ __forceinline__ int expert(int list, int lane) { return (lane * kLISTS + list) * kTOGETHER; }

    /// `logits` [E] f32 in global memory, read past L1.
    __device__ __forceinline__ void load(float const* logits, int lane) {
#pragma unroll
        for (int i = 0; i < kLISTS; ++i) {
            float const* const source = logits + expert(i, lane);
            if constexpr (kTOGETHER == 4) {
                float4 const four = __ldcg(reinterpret_cast<float4 const*>(source));
                values[i][0] = four.x;
                values[i][1] = four.y;
                values[i][2] = four.z;
                values[i][3] = four.w;
            } else {
                values[i][0] = expert(i, lane) < E ? __ldcg(source) : 0.0f;
            }
        }
    }
};

/// The same as keys in the order of floats, each list sorted: a choice is one maximum over the warp and one vote.
template <int E>
struct RouterKeys {
    using Logits = RouterLogits<E>;
    detail::SortedKeys<Logits::kTOGETHER> lists[Logits::kLISTS];

    struct Best {
        uint32_t key;
        unsigned holders; ///< lanes with such a key: the lowest one held the expert
        bool mine;        ///< whether this lane is that one
        int expert;       ///< valid in that lane
    };

    __device__ __forceinline__ RouterKeys(Logits const& logits, int lane) {
#pragma unroll
        for (int i = 0; i < Logits::kLISTS; ++i) {
#pragma unroll
            for (int j = 0; j < Logits::kTOGETHER; ++j) {
                lists[i].keys[j] = Logits::expert(i, lane) < E ? detail::orderedKey(logits.values[i][j]) : 0;
            }
            lists[i].sort();
        }
    }

    /// Take the expert with the largest logit away, ties to the lowest index. Not more than E times.
    __device__ __forceinline__ Best takeBest(int lane) {
        uint32_t mine = 0;
#pragma unroll
        for (int i = 0; i < Logits::kLISTS; ++i) {
            mine = max(mine, lists[i].keys[0]);
        }
        Best best;
        best.key = __reduce_max_sync(0xFFFFFFFFu, mine);
        // The lowest index among equals: in the first lane that has any, in its first list.
        best.holders = __ballot_sync(0xFFFFFFFFu, mine == best.key);
        best.mine = (best.holders & (0u - best.holders)) == 1u << lane;
        best.expert = 0;
        bool found = false;
#pragma unroll
        for (int i = 0; i < Logits::kLISTS; ++i) {
            bool const here = !found && lists[i].keys[0] == best.key;
            best.expert = here ? Logits::expert(i, lane) + static_cast<int>(lists[i].places % 256) : best.expert;
            found = found || here;
            if (best.mine && here) {
                lists[i].pop();
            }
        }
        return best;
    }
};

/// Route one token by one warp; every lane gets the result.
template <int E>
__device__ __forceinline__ Routes routeToken(RouterLogits<E> const& logits, int lane) {
    RouterKeys<E> keys(logits, lane);
    Routes routes;
    float total = 0;
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        auto const best = keys.takeBest(lane);
        routes.expert[slot] = __shfl_sync(0xFFFFFFFFu, best.expert, __ffs(static_cast<int>(best.holders)) - 1);
        routes.weight[slot] = 1.0f / (1.0f + expf(-detail::fromKey(best.key)));
        total += routes.weight[slot];
    }
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        routes.weight[slot] /= total;
    }
    return routes;
}

template <int E>
__device__ __forceinline__ Routes routeToken(float const* source, int lane) {
    RouterLogits<E> logits;
    logits.load(source, lane);
    return routeToken<E>(logits, lane);
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
/// `logits`. `first` is scratch. Ends with a barrier.
template <int E, int TOKENS>
__device__ __forceinline__ void routeStep(RouterLogits<E> const& logits, int tokens, StepRoutes<TOKENS>& routes,
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
        Routes const mine = routeToken<E>(logits, lane);
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
