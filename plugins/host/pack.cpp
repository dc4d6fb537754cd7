#include "host/pack.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#define FLINT_EXPORT extern "C" __attribute__((visibility("default")))

// On x86-64 for wider registers, too, chosen where the library is loaded.
#if defined(__x86_64__)
#    define FLINT_WIDE __attribute__((target_clones("avx2", "default")))
#else
#    define FLINT_WIDE
#endif

namespace {

constexpr int kHalfRows = 8;
constexpr int kBlockBytes = 36; // of 64 values: 4 scales, then 32 bytes of codes
constexpr int kScales = 4;
constexpr int kTileColumns = 64;
constexpr int kLanes = 4; // that share a row of a tile

uint64_t load(void const* from) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

/// The bits of a half word of codes, moved as layout.py's _BIT_ORDER says. A factor of several powers of two shifts by
/// each of them: the mask before it leaves the copies room, the mask behind it keeps the wanted ones. A compiler does
/// this on many half words at once, which a table cannot.
[[gnu::always_inline]] inline uint16_t spread(uint16_t word) {
    auto const move = [](uint16_t bits, uint16_t mask, uint16_t factor, uint16_t kept) __attribute__((always_inline)) {
        return static_cast<uint16_t>(static_cast<uint16_t>((bits & mask) * factor) & kept);
    };
    uint16_t const high = move(word >> 6, 0x019E, 1 << 0 | 1 << 5 | 1 << 13, 0x701C);
    uint16_t const middle = move(word, 0x8847, 1 << 0 | 1 << 1 | 1 << 8, 0x8F80);
    uint16_t const low = move(word >> 1, 0x081C, 1 << 0 | 1 << 3 | 1 << 13, 0xC018);
    return static_cast<uint16_t>((high | middle) >> 2 | low);
}

/// The codes of a panel's tile: 512 bytes, [8 rows][4 lanes][upper, lower][8 bytes].
FLINT_WIDE void packCodes(uint8_t const* upper, uint8_t const* lower, int64_t rowBytes, uint8_t* packed) {
    uint16_t words[kHalfRows * kLanes * 8];
    auto* out = reinterpret_cast<uint8_t*>(words);
    for (int row = 0; row < kHalfRows; ++row) {
        for (int lane = 0; lane < kLanes; ++lane, out += 16) {
            std::memcpy(out, upper + row * rowBytes + 8 * lane, 8);
            std::memcpy(out + 8, lower + row * rowBytes + 8 * lane, 8);
        }
    }
    for (auto& word : words) {
        word = spread(word);
    }
    std::memcpy(packed, words, sizeof words);
}

/// The scales of `count` tiles of a panel: [8 rows][4 lanes][count][upper, lower] bytes.
void packScales(uint8_t const* upper, uint8_t const* lower, int64_t rowBytes, int count, uint8_t* packed) {
    for (int row = 0; row < kHalfRows; ++row, packed += 2 * kLanes * count) {
        for (int tile = 0; tile < count; ++tile) {
            uint8_t const* const above = upper + row * rowBytes + tile * kBlockBytes;
            uint8_t const* const below = lower + row * rowBytes + tile * kBlockBytes;
            for (int lane = 0; lane < kLanes; ++lane) {
                packed[2 * (lane * count + tile)] = above[lane];
                packed[2 * (lane * count + tile) + 1] = below[lane];
            }
        }
    }
}

/// Values c to c + 3 as (c, c + 2) in the low half and (c + 1, c + 3) in the high one: the pairs of two instructions.
uint64_t pairs(uint16_t const* values) {
    uint64_t const word = load(values);
    uint64_t const middle = 0xFFFF0000u;
    return (word & ~(middle | middle << 16)) | (word & middle) << 16 | (word >> 16 & middle);
}

/// A panel's tile in BF16: 1,024 values, [4 instructions][8 rows][4 lanes][8 values].
void packTile(uint16_t const* upper, uint16_t const* lower, int64_t columns, uint16_t* packed) {
    constexpr int kInstruction = kHalfRows * kLanes * 8;
    uint64_t const low = 0xFFFFFFFFu;
    for (int row = 0; row < kHalfRows; ++row) {
        for (int lane = 0; lane < kLanes; ++lane) {
            uint16_t const* const above = upper + row * columns + 16 * lane;
            uint16_t const* const below = lower + row * columns + 16 * lane;
            uint16_t* const out = packed + (row * kLanes + lane) * 8;
            for (int quarter = 0; quarter < 4; ++quarter) { // columns 0 to 3, 4 to 7, …
                uint64_t const u = pairs(above + 4 * quarter);
                uint64_t const l = pairs(below + 4 * quarter);
                uint64_t const even = (u & low) | l << 32;
                uint64_t const odd = u >> 32 | (l & ~low);
                uint16_t* const to = out + (quarter % 2) * 2 * kInstruction + (quarter / 2) * 4;
                std::memcpy(to, &even, sizeof even);
                std::memcpy(to + kInstruction, &odd, sizeof odd);
            }
        }
    }
}

} // namespace

FLINT_EXPORT int32_t flintPackNvfp4(uint8_t const* upper, uint8_t const* lower, int64_t panelStride, int64_t panels,
                                    int32_t tiles, uint8_t* packed) {
    int64_t const rowBytes = int64_t{tiles} * kBlockBytes;
    int const group = std::gcd(kScales, tiles);
    int64_t const scaleBytes = int64_t{tiles} * kTileColumns;
    uint8_t largest = 0;
    for (int64_t panel = 0; panel < panels; ++panel, upper += panelStride, lower += panelStride) {
        for (int tile = 0; tile < tiles; ++tile, packed += 512) {
            int64_t const at = int64_t{tile} * kBlockBytes + kScales;
            packCodes(upper + at, lower + at, rowBytes, packed);
        }
        for (int tile = 0; tile < tiles; tile += group) {
            int64_t const at = int64_t{tile} * kBlockBytes;
            packScales(upper + at, lower + at, rowBytes, group, packed + tile * int64_t{kTileColumns});
        }
        uint8_t most = 0;
        for (int64_t i = 0; i < scaleBytes; ++i) {
            most = std::max(most, packed[i]);
        }
        largest = std::max(largest, most);
        packed += scaleBytes;
    }
    return largest;
}

FLINT_EXPORT void flintPackBf16(uint16_t const* upper, uint16_t const* lower, int64_t panelStride, int64_t panels,
                                int32_t tiles, uint16_t* packed) {
    int64_t const columns = int64_t{tiles} * kTileColumns;
    for (int64_t panel = 0; panel < panels; ++panel, upper += panelStride, lower += panelStride) {
        for (int tile = 0; tile < tiles; ++tile, packed += 1024) {
            packTile(upper + tile * kTileColumns, lower + tile * kTileColumns, columns, packed);
        }
    }
}
