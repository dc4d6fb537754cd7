// A block finds a row's best tokens, exactly, and reads little of the row.
//
// Order the groups by (maximum, lowest index). The `wanted` best tokens lie in the `wanted` best groups: a token of any
// other group has at least `wanted` tokens before it, the groups' maxima. So a threshold that `wanted` groups reach
// leaves few groups, and in them few tokens reach it. These are ranked by counting. Forbidden tokens are never listed.
#pragma once

#include "kernels/sample/block.cuh"
#include "kernels/sample/row.cuh"

namespace flint::sample {

constexpr int kLIST = 512;    // Tokens that can be ranked.
constexpr int kLIMITED = 256; // The largest top_k that the list serves.
constexpr int kLISTED_GROUPS = 1024;
constexpr int kSLACK = 12; // A threshold is good enough if so many more reach it: two groups per warp for the 20 best.
constexpr int kTOO_MANY = -1;
constexpr uint64_t kLEAST_ALLOWED = uint64_t{0x00800000u} << 32; // No key of a finite logit is less; those of -inf are.

struct SelectShared {
    uint64_t list[kLIST];   ///< keys, in no order
    uint64_t sorted[kLIST]; ///< keys, best first
    int group[kLISTED_GROUPS];
    int groupsFound, found;
    uint32_t reduce[2][kWARPS];
};

/// Ties: whether tokens that equal the last of the best are wanted, too, or the lowest indices only.
enum class Ties { kALL, kLOWEST };

/// The largest threshold that `wanted` keys reach, or the first found that at most `enough` reach; if there are fewer
/// keys 0, or, where some tokens may be forbidden (`Adjusted`), what every allowed token reaches. `count(threshold)` is
/// the number of keys >= threshold, the same in every thread.
template <bool Adjusted, typename Count>
__device__ __forceinline__ uint64_t findThreshold(Ties ties, int wanted, int enough, Count count) {
    if (Adjusted && count(kLEAST_ALLOWED) < wanted) {
        return kLEAST_ALLOWED;
    }
    uint64_t threshold = 0;
    for (int bit = 63; bit >= (ties == Ties::kALL ? 32 : 0); --bit) {
        uint64_t const candidate = threshold | uint64_t{1} << bit;
        int const reached = count(candidate);
        if (reached >= wanted) {
            threshold = candidate;
            if (reached <= enough) {
                break;
            }
        }
    }
    return threshold;
}

/// A group's key: no higher than that of its best token, and in the groups' own order.
__device__ __forceinline__ uint64_t keyOfGroup(float maximum, int group) {
    return keyOf(maximum, group * kGROUP + kGROUP - 1);
}

template <bool Adjusted>
__device__ void listTokens(Row const& row, uint64_t threshold, SelectShared& shared) {
    if (threadIdx.x == 0) {
        shared.found = 0;
    }
    __syncthreads();
    forEachLogit<Adjusted>(
        row, threadIdx.x / kWARP, shared.groupsFound, kWARPS, [&](int n) { return shared.group[n]; },
        [&](float l, int index) {
            uint64_t const key = keyOf(l, index);
            if (key >= threshold) {
                int const place = atomicAdd(&shared.found, 1);
                if (place < kLIST) {
                    shared.list[place] = key;
                }
            }
        });
    __syncthreads();
}

/// Fill shared.sorted with at least the `wanted` best tokens of the row, or all that are allowed if those are fewer,
/// and with Ties::kALL all that equal the last of them; returns how many, or kTOO_MANY if they do not fit (never with
/// Ties::kLOWEST and a token that is allowed). `maxima[group * stride]` are the groups' maxima. wanted <= kLIMITED.
template <bool Adjusted>
__device__ int selectBest(Row const& row, float const* maxima, int stride, int groups, int wanted, Ties ties,
                          SelectShared& shared) {
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP;
    int const enough = wanted + kSLACK;
    uint64_t best = 0;
    for (int group = threadIdx.x; group < groups; group += kTHREADS) {
        best = max(best, keyOfGroup(maxima[group * stride], group));
    }
    if (threadIdx.x == 0) {
        shared.groupsFound = 0;
    }
    // One key per thread: if `wanted` threads reach a threshold, so do `wanted` groups.
    uint64_t threshold =
        findThreshold<Adjusted>(ties, wanted, enough, [&](uint64_t key) { return __syncthreads_count(best >= key); });
    for (int group = threadIdx.x; group < groups; group += kTHREADS) {
        if (keyOfGroup(maxima[group * stride], group) >= threshold) {
            int const place = atomicAdd(&shared.groupsFound, 1);
            if (place < kLISTED_GROUPS) {
                shared.group[place] = group;
            }
        }
    }
    __syncthreads();
    if (shared.groupsFound > kLISTED_GROUPS) {
        __syncthreads(); // Before a next call resets the number that slower threads still have to read.
        return kTOO_MANY;
    }
    listTokens<Adjusted>(row, threshold, shared);
    if (shared.found > kLIST) {
        int parity = 0;
        threshold = findThreshold<Adjusted>(ties, wanted, enough, [&](uint64_t candidate) {
            int reached = 0;
            forEachLogit<Adjusted>(
                row, warp, shared.groupsFound, kWARPS, [&](int n) { return shared.group[n]; },
                [&](float l, int index) { reached += keyOf(l, index) >= candidate; });
            parity ^= 1;
            return blockCount(reached, shared.reduce[parity]);
        });
        listTokens<Adjusted>(row, threshold, shared);
        if (shared.found > kLIST) {
            return kTOO_MANY;
        }
    }
    int const found = shared.found;
    for (int i = warp; i < found; i += kWARPS) {
        uint64_t const key = shared.list[i];
        unsigned before = 0;
        for (int j = lane; j < found; j += kWARP) {
            before += shared.list[j] > key;
        }
        before = __reduce_add_sync(kALL, before);
        if (lane == 0) {
            shared.sorted[before] = key;
        }
    }
    __syncthreads();
    return found;
}

} // namespace flint::sample
