// Router weights as matrix-instruction operands.
#pragma once

#include "kernels/panel.cuh"

namespace flint {

/// An FP32 weight is the exact sum of three BF16 numbers (8 + 8 + 8 bits of significand), so three matrix instructions
/// multiply it without narrowing; a BF16 weight is its own first part.
template <typename R>
constexpr int kROUTER_PARTS = sizeof(R) == 4 ? 3 : 1;

/// A lane's 16 columns of rows g and g + 8 of 16 router rows (see panel.cuh), as they stand in memory. With HALVES = 1
/// of row g of 8 router rows; then operands of rows g + 8 are zeros.
template <typename R, int HALVES = 2>
struct RouterTile {
    static constexpr int kVECTORS = 16 * sizeof(R) / 16; ///< of a row
    uint4 rows[HALVES][kVECTORS];

    /// `row`, `rowBelow`: to the lane's first column. `read` loads 16 bytes.
    template <typename Read>
    __device__ __forceinline__ void load(R const* row, R const* rowBelow, Read const& read) {
#pragma unroll
        for (int i = 0; i < kVECTORS; ++i) {
            rows[0][i] = read(reinterpret_cast<uint4 const*>(row) + i);
            if constexpr (HALVES == 2) {
                rows[1][i] = read(reinterpret_cast<uint4 const*>(rowBelow) + i);
            }
        }
    }

    __device__ __forceinline__ float value(int half, int column) const {
        auto const* const words = reinterpret_cast<uint32_t const*>(rows[half]);
        if constexpr (sizeof(R) == 4) {
            return __uint_as_float(words[column]);
        } else {
            float2 const pair = unpackBf16(words[column / 2]);
            return column % 2 == 0 ? pair.x : pair.y;
        }
    }

    /// A operands of COUNT instructions from `first` on: [part][instruction][register].
    template <int COUNT>
    __device__ __forceinline__ void operands(uint32_t (&a)[kROUTER_PARTS<R>][COUNT][4], int first = 0) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    constexpr int STARTS[4] = {0, 1, 4, 5};
                    int const column = 8 * pair + STARTS[first + i];
                    float low = half < HALVES ? value(half, column) : 0.0f;
                    float high = half < HALVES ? value(half, column + 2) : 0.0f;
#pragma unroll
                    for (int part = 0; part < kROUTER_PARTS<R>; ++part) {
                        uint32_t const rounded = packBf16(low, high);
                        a[part][i][pair * 2 + half] = rounded;
                        float2 const taken = unpackBf16(rounded);
                        low -= taken.x;
                        high -= taken.y;
                    }
                }
            }
        }
    }
};

} // namespace flint
