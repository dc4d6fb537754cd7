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
    __device__ __forceinline__ RouterKeys(float const* logits, int lane) {
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
        // NaN logits leave no key: stay in range, the weights will be NaN.
        return static_cast<int>(min(chosen, unsigned{E - 1}));
    }
};

/// Route one token by one warp; every lane gets the result.
template <int E>
__device__ __forceinline__ Routes routeToken(float const* logits, int lane) {
    RouterKeys<E> keys(logits, lane);
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

/// Only the expert of one slot.
template <int E>
__device__ __forceinline__ int routeSlot(float const* logits, int slot, int lane) {
    RouterKeys<E> keys(logits, lane);
    int expert = 0;
    for (int i = 0; i <= slot; ++i) {
        uint32_t top;
        expert = keys.takeBest(lane, top);
    }
    return expert;
}

} // namespace flint
