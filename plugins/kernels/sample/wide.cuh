// Draw from a whole row: no top-k, a large one, or so many equal logits that no list holds them.
//
// `ranks` blocks of a cluster share the row, each a run of its groups. Top-k and top-p each search one threshold, digit
// by digit (11, 11, 10 bits), with a histogram in every block and the sum of the blocks' histograms. Amounts are
// integers, so the order of the additions does not matter, nor does the number of blocks.
#pragma once

#include "kernels/sample/block.cuh"
#include "kernels/sample/row.cuh"

#include <cooperative_groups.h>

namespace flint::sample {

constexpr int kBINS = 2048;
constexpr int kOWN_BINS = kBINS / kTHREADS;

struct WideShared {
    uint32_t low[kBINS], high[kBINS]; ///< histogram: 64-bit amounts in halves, as shared memory adds only 32 bits
    uint64_t warps[kWARPS];
    uint32_t reduce[kWARPS];
    uint64_t before; ///< amount of all larger keys
    uint32_t digit;
    uint64_t part; ///< kept weight of this block's run
    int token;     ///< in rank 0's block: the drawn token
};

/// A block's share of a row. With one rank the other blocks of the cluster have ended, or there are none.
struct Part {
    Row const& row;
    int rank, ranks, begin, end; ///< groups
    WideShared& shared;

    __device__ void sync() const {
        if (ranks == 1) {
            __syncthreads();
        } else {
            cooperative_groups::this_cluster().sync();
        }
    }

    template <typename Visit>
    __device__ void forEach(int first, int last, int step, Visit visit) const {
        forEachLogit<true>(row, first, last, step, [](int group) { return group; }, [&](float l, int) { visit(l); });
    }

    /// The same variable in another block of the cluster.
    template <typename T>
    __device__ T* of(int other, T* variable) const {
        return other == rank ? variable : cooperative_groups::this_cluster().map_shared_rank(variable, other);
    }
};

/// A key and its amount; an amount of 0 counts for nothing.
struct Weighed {
    uint32_t key;
    uint64_t amount;
};

__device__ __forceinline__ void addToBin(WideShared& shared, uint32_t bin, uint64_t amount) {
    auto const low = static_cast<uint32_t>(amount);
    auto high = static_cast<uint32_t>(amount >> 32);
    uint32_t const old = atomicAdd(&shared.low[bin], low);
    high += old + low < old; // The addition that wraps around carries; their order does not matter.
    if (high != 0) {
        atomicAdd(&shared.high[bin], high);
    }
}

/// The largest key such that it and all larger ones amount to `wanted(total)` or more. weigh(l) -> Weighed; the total
/// is the same on every rank, and wanted(total) is from 1 to total.
template <typename Weigh, typename Wanted>
__device__ uint32_t findKey(Part const& part, Weigh weigh, Wanted wanted) {
    WideShared& shared = part.shared;
    int const self = threadIdx.x;
    uint32_t prefix = 0;
    uint64_t before = 0, limit = 0;
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
        int const shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        int const bits = pass == 2 ? 10 : 11;
        for (int bin = self; bin < kBINS; bin += kTHREADS) {
            shared.low[bin] = shared.high[bin] = 0;
        }
        __syncthreads();
        part.forEach(part.begin + self / kWARP, part.end, kWARPS, [&](float l) {
            Weighed const weighed = weigh(l);
            bool const inside = pass == 0 || weighed.key >> (shift + bits) == prefix;
            if (inside && weighed.amount != 0) {
                addToBin(shared, weighed.key >> shift & ((1u << bits) - 1), weighed.amount);
            }
        });
        part.sync();
        // Each rank sums a slice of the bins over all ranks, in place, and then reads the other slices.
        int const slice = kBINS / part.ranks;
        if (part.ranks > 1) {
            for (int bin = part.rank * slice + self; bin < (part.rank + 1) * slice; bin += kTHREADS) {
                uint64_t sum = 0;
                for (int rank = 0; rank < part.ranks; ++rank) {
                    sum +=
                        static_cast<uint64_t>(part.of(rank, shared.high)[bin]) << 32 | part.of(rank, shared.low)[bin];
                }
                shared.low[bin] = static_cast<uint32_t>(sum);
                shared.high[bin] = static_cast<uint32_t>(sum >> 32);
            }
            part.sync();
        }
        // Thread 0 has the highest bins.
        int const lowest = kBINS - kOWN_BINS * (self + 1);
        uint32_t const* const low = part.of(lowest / slice, shared.low) + lowest;
        uint32_t const* const high = part.of(lowest / slice, shared.high) + lowest;
        uint64_t amounts[kOWN_BINS], own = 0;
#pragma unroll
        for (int i = 0; i < kOWN_BINS; ++i) {
            amounts[i] = static_cast<uint64_t>(high[i]) << 32 | low[i];
            own += amounts[i];
        }
        uint64_t total;
        uint64_t larger = before + blockExclusiveSum64(own, shared.warps, total);
        if (pass == 0) {
            limit = wanted(total);
        }
#pragma unroll
        for (int i = kOWN_BINS - 1; i >= 0; --i) {
            if (larger < limit && limit <= larger + amounts[i]) {
                shared.digit = lowest + i;
                shared.before = larger;
            }
            larger += amounts[i];
        }
        part.sync();
        prefix = prefix << bits | shared.digit;
        before = shared.before;
    }
    return prefix;
}

/// The token that `target(total of the kept weights)` falls on, by index. kept(l) is a logit's weight. Returned by rank
/// 0 in every thread; the other ranks return anything.
template <typename Kept>
__device__ int drawFromPart(Part const& part, Draw const& draw, Kept kept) {
    WideShared& shared = part.shared;
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP;
    int const run = (part.end - part.begin + kWARPS - 1) / kWARPS;
    int const begin = part.begin + warp * run, end = min(begin + run, part.end);
    uint64_t sum = 0;
    part.forEach(begin, end, 1, [&](float l) { sum += kept(l); });
    uint64_t blockTotal;
    uint64_t const inclusive = blockExclusiveSum64(sum, shared.warps, blockTotal) + sum;
    uint64_t const warpEnd = __shfl_sync(kALL, inclusive, kWARP - 1);
    sum = warpSum64(sum);
    if (threadIdx.x == 0) {
        shared.part = blockTotal;
    }
    part.sync();
    uint64_t before = 0, total = 0;
    for (int rank = 0; rank < part.ranks; ++rank) {
        uint64_t const other = *part.of(rank, &shared.part);
        before += rank < part.rank ? other : 0;
        total += other;
    }
    uint64_t const target = draw.target(total);
    before += warpEnd - sum;
    if (before <= target && target < before + sum) { // True of one warp of the cluster.
        for (int group = begin; group < end; ++group) {
            uint64_t own = 0;
            part.forEach(group, group + 1, 1, [&](float l) { own += kept(l); });
            uint64_t const upTo = before + warpInclusiveSum64(own);
            if (upTo - own <= target && target < upTo) { // True of one lane, of one group.
                float l[4];
                part.row.load<true>(group, lane, l);
                uint64_t running = upTo - own;
                int place = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    running += kept(l[i]);
                    place += running <= target;
                }
                *part.of(0, &shared.token) = group * kGROUP + lane * 4 + place;
            }
            before = __shfl_sync(kALL, upTo, kWARP - 1);
        }
    }
    part.sync();
    return shared.token;
}

/// Draw with top_k `topK` (0: off). `maxima` are the groups' adjusted maxima. Called by all threads of `ranks` blocks.
__device__ int drawWide(Row const& row, float const* maxima, int stride, int groups, int topK, Draw const& draw,
                        int rank, int ranks, WideShared& shared) {
    int const share = (groups + ranks - 1) / ranks;
    int const begin = min(groups, rank * share);
    Part const part{row, rank, ranks, begin, min(groups, begin + share), shared};
    uint32_t order = 0;
    for (int group = threadIdx.x; group < groups; group += kTHREADS) {
        order = max(order, orderOf(maxima[group * stride]));
    }
    float const largest = valueOf(blockMax(order, shared.reduce));
    uint32_t least = 0;
    if (topK > 0) {
        least = findKey(part, [](float l) { return Weighed{orderOf(l), 1}; }, [&](uint64_t) { return topK; });
    }
    auto const weight = [&](float l) {
        return orderOf(l) >= least ? draw.weight(l, largest) : 0.0f;
    };
    // Weights from 1 to 2^40 as FP32 bits, counted from those of 1: 29 bits, moved to the top.
    auto const keyOfWeight = [](float w) {
        return (__float_as_uint(w) - __float_as_uint(1.0f)) << 3;
    };
    uint32_t cut = 0;
    if (draw.topP < 1.0f) {
        cut = findKey(
            part,
            [&](float l) {
                float const w = weight(l);
                return Weighed{keyOfWeight(w), __float2ull_rz(w)};
            },
            [&](uint64_t total) { return draw.limit(total); });
    }
    return drawFromPart(part, draw, [&](float l) -> uint64_t {
        float const w = weight(l);
        return w > 0 && keyOfWeight(w) >= cut ? __float2ull_rz(w) : 0;
    });
}

} // namespace flint::sample
