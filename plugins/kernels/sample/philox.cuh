// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
#pragma once

#include <cstdint>

namespace flint {

/// The first 64 random bits of a counter's first word and a key: word 0 low. The counter's other words are zero.
__device__ __forceinline__ uint64_t philox4x32(uint32_t counter, uint32_t key0, uint32_t key1) {
    uint32_t a = counter, b = 0, c = 0, d = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        uint32_t const highA = __umulhi(a, 0xD2511F53u), lowA = a * 0xD2511F53u;
        uint32_t const highC = __umulhi(c, 0xCD9E8D57u), lowC = c * 0xCD9E8D57u;
        a = highC ^ b ^ key0;
        b = lowC;
        c = highA ^ d ^ key1;
        d = lowA;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return static_cast<uint64_t>(b) << 32 | a;
}

} // namespace flint
