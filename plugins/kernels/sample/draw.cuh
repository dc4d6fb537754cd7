// Draw from a short, sorted list of tokens: rows with a top_k of at most kLIMITED.
#pragma once

#include "kernels/sample/select.cuh"

namespace flint::sample {

struct DrawShared {
    uint64_t weight[kLIST]; ///< after top-k and min-p
    uint64_t kept[kLIST];   ///< after top-p, too
    int token;
};

/// Sum over the first `count` entries of `pick(i)`, the same in every lane.
template <typename Pick>
__device__ __forceinline__ uint64_t warpSumOver(int count, Pick pick) {
    uint64_t sum = 0;
    for (int i = threadIdx.x % kWARP; i < count; i += kWARP) {
        sum += pick(i);
    }
    return warpSum64(sum);
}

/// `found` sorted keys, with all that equal the topK-th, or all there are if those are fewer; 1 <= topK, 1 <= found.
/// The same result in every thread.
__device__ int drawFromList(uint64_t const* sorted, int found, int topK, Draw const& draw, DrawShared& shared) {
    int const self = threadIdx.x, warp = threadIdx.x / kWARP;
    float const largest = valueOf(orderOfKey(sorted[0]));
    bool const within = self < found && orderOfKey(sorted[self]) >= orderOfKey(sorted[min(topK, found) - 1]);
    if (within) {
        shared.weight[self] = __float2ull_rz(draw.weight(valueOf(orderOfKey(sorted[self])), largest));
    }
    int const count = __syncthreads_count(within);
    uint64_t limit = UINT64_MAX;
    if (draw.topP < 1.0f) {
        limit = draw.limit(warpSumOver(count, [&](int i) { return shared.weight[i]; }));
    }
    for (int i = warp; i < count; i += kWARPS) {
        uint64_t const weight = shared.weight[i];
        uint64_t const larger =
            warpSumOver(count, [&](int j) { return shared.weight[j] > weight ? shared.weight[j] : 0; });
        if (self % kWARP == 0) {
            shared.kept[i] = larger < limit ? weight : 0;
        }
    }
    __syncthreads();
    uint64_t const target = draw.target(warpSumOver(count, [&](int i) { return shared.kept[i]; }));
    for (int i = warp; i < count; i += kWARPS) {
        int const index = indexOfKey(sorted[i]);
        uint64_t const before =
            warpSumOver(count, [&](int j) { return indexOfKey(sorted[j]) < index ? shared.kept[j] : 0; });
        if (self % kWARP == 0 && before <= target && target < before + shared.kept[i]) {
            shared.token = index;
        }
    }
    __syncthreads();
    return shared.token;
}

} // namespace flint::sample
