// Where in one arena each activation lies: tensors that are never alive together may share bytes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flint::host {

/// Every offset is a multiple of it: what cudaMalloc guarantees, and more than any kernel's widest access.
inline constexpr int64_t kARENA_ALIGNMENT = 256;

/// A block of memory and the first and last node (inclusive) that needs it.
struct Lifetime {
    int64_t bytes;
    int first;
    int last;
};

struct MemoryPlan {
    /// Per block, in bytes from the arena's start.
    std::vector<int64_t> offsets;
    int64_t bytes = 0;
};

/// Place every block: the largest first, each in the tightest gap between the blocks that are alive with it. Throws
/// HostError for a negative size or a lifetime that ends before it begins.
MemoryPlan planMemory(std::span<Lifetime const> blocks);

} // namespace flint::host
