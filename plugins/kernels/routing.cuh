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

/// Route one token by one warp; every lane gets the result. `logits` [E] f32 in global memory, read past L1.
template <int E>
__device__ __forceinline__ Routes routeToken(float const* logits, int lane) {
    constexpr int OWN = (E + kWARP - 1) / kWARP;
    uint32_t keys[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int const expert = i * kWARP + lane;
        keys[i] = expert < E ? detail::orderedKey(__ldcg(logits + expert)) : 0;
    }
    Routes routes;
    float total = 0;
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        uint32_t best = 0;
        int place = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (keys[i] > best) {
                best = keys[i];
                place = i;
            }
        }
        uint32_t const top = __reduce_max_sync(0xFFFFFFFFu, best);
        unsigned const mine = best == top ? place * kWARP + lane : 0xFFFFFFFFu;
        unsigned const chosen = __reduce_min_sync(0xFFFFFFFFu, mine);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (chosen == static_cast<unsigned>(i * kWARP + lane)) {
                keys[i] = 0;
            }
        }
        // NaN logits leave no key: stay in range, the weights will be NaN.
        routes.expert[slot] = static_cast<int>(min(chosen, unsigned{E - 1}));
        routes.weight[slot] = 1.0f / (1.0f + expf(-detail::fromKey(top)));
        total += routes.weight[slot];
    }
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        routes.weight[slot] /= total;
    }
    return routes;
}

} // namespace flint
