#include "host/memory_plan.h"

#include "host/errors.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace flint::host {

namespace {

int64_t aligned(int64_t bytes) {
    return (bytes + kARENA_ALIGNMENT - 1) / kARENA_ALIGNMENT * kARENA_ALIGNMENT;
}

bool overlap(Lifetime const& a, Lifetime const& b) {
    return a.first <= b.last && b.first <= a.last;
}

} // namespace

MemoryPlan planMemory(std::span<Lifetime const> blocks) {
    for (Lifetime const& block : blocks) {
        if (block.bytes < 0 || block.bytes > std::numeric_limits<int64_t>::max() / 2 || block.last < block.first) {
            throw HostError("memory plan: a block of " + std::to_string(block.bytes) + " bytes alive from node " +
                            std::to_string(block.first) + " to " + std::to_string(block.last));
        }
    }
    std::vector<size_t> order(blocks.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return blocks[a].bytes > blocks[b].bytes; });

    MemoryPlan plan;
    plan.offsets.assign(blocks.size(), 0);
    std::vector<size_t> placed; // By offset.
    for (size_t const index : order) {
        Lifetime const& block = blocks[index];
        int64_t const bytes = aligned(block.bytes);
        if (bytes == 0) {
            continue;
        }
        int64_t free = 0; // End of the blocks passed so far.
        int64_t best = -1;
        int64_t bestGap = std::numeric_limits<int64_t>::max();
        for (size_t const other : placed) {
            if (!overlap(block, blocks[other])) {
                continue;
            }
            int64_t const gap = plan.offsets[other] - free;
            if (gap >= bytes && gap < bestGap) {
                best = free;
                bestGap = gap;
            }
            free = std::max(free, plan.offsets[other] + aligned(blocks[other].bytes));
        }
        plan.offsets[index] = best >= 0 ? best : free;
        plan.bytes = std::max(plan.bytes, plan.offsets[index] + bytes);
        auto const byOffset = [&](size_t a, size_t b) {
            return plan.offsets[a] < plan.offsets[b];
        };
        placed.insert(std::upper_bound(placed.begin(), placed.end(), index, byOffset), index);
    }
    return plan;
}

} // namespace flint::host
