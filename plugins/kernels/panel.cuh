// Packed weights on the device: reading the panels of flint_plugins/layout.py as matrix-instruction operands.
//
// A weight [N, K] is N / 16 panels of 16 rows, a panel K / 64 tiles. A lane (g = lane / 4, t = lane % 4) holds columns
// 16t .. 16t + 15 of rows g and g + 8 of a tile: the A operands of four m16n8k16 instructions. Activations must be read
// in the same order of K, `activationOrder`.
#pragma once

#include "kernels/device.cuh"

namespace flint {

constexpr int kPANEL_ROWS = 16;
constexpr int kTILE_COLUMNS = 64;

/// Position, among a lane's 16 values of a tile, of column c (0 .. 15): the order in which dequantisation yields them.
/// Values 4i .. 4i + 3 are the B operand of instruction i: columns (c, c + 2, c + 8, c + 10), c = (0, 1, 4, 5)[i].
__host__ __device__ constexpr int activationOrder(int column) {
    int const low = column % 8; // c or c + 2 within a group of 4
    int const instruction = (low / 4) * 2 + low % 2;
    return instruction * 4 + (column / 8) * 2 + (low % 4) / 2;
}

/// NVFP4 dequantisation is exact in BF16 but for a constant power of two, which the epilogue multiplies back: E2M1
/// placed into BF16's bits is e2m1 * 2^-126, an E4M3 scale e4m3 * 2^-120, and two factors of 2^119 bring their product
/// to e2m1 * e4m3 * 2^-8 without leaving BF16's range.
constexpr float kNVFP4_RESTORE = 256.0f;

template <WeightFormat F>
constexpr float kRESTORE = F == WeightFormat::kNVFP4 ? kNVFP4_RESTORE : 1.0f;

__host__ __device__ constexpr int64_t panelBytes(WeightFormat format, int64_t columns) {
    return format == WeightFormat::kNVFP4 ? 9 * columns : 32 * columns;
}

/// Tiles whose scales stand together; gcd(4, K / 64).
__host__ __device__ constexpr int scaleGroup(int tiles) {
    return tiles % 4 == 0 ? 4 : tiles % 2 == 0 ? 2 : 1;
}

namespace detail {

/// word * FACTOR, kept a multiplication: the compiler would shift.
template <uint32_t FACTOR>
__device__ __forceinline__ uint32_t multiplyInteger(uint32_t word) {
    uint32_t product;
    asm("mad.lo.u32 %0, %1, %2, 0;" : "=r"(product) : "r"(word), "n"(FACTOR));
    return product;
}

/// Code J of both halves of a word, from E2M1 to BF16: e2m1 * 2^-126. Where its bits lie: layout.py, _BIT_ORDER.
///
/// Integer units do masks and shifts at half the rate of everything else, and dequantising is the most of what decode
/// kernels do: so shifts to the left are multiplications.
template <int J>
__device__ __forceinline__ uint32_t placeE2m1(uint32_t word) {
    constexpr uint32_t PLACES = 0x81C081C0u;
    if constexpr (J == 0) {
        return word & PLACES;
    } else if constexpr (J == 1) {
        return multiplyInteger<1 << 3>(word) & PLACES;
    } else if constexpr (J == 2) {
        return multiplyInteger<1 << 6>(word) & PLACES;
    } else {
        // Exponent in bits 3 and 2, sign in 5, mantissa in 6: no two of the twelve products meet.
        return multiplyInteger<(1 << 5) + 1 + (1 << 10)>((word >> 8) & 0x006C006Cu) & PLACES;
    }
}

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    bf16x2 const product = __hmul2(reinterpret_cast<bf16x2 const&>(a), reinterpret_cast<bf16x2 const&>(b));
    return reinterpret_cast<uint32_t const&>(product);
}

} // namespace detail

/// The A operands of an NVFP4 tile, dequantised, times 1 / kNVFP4_RESTORE.
///
/// `codes`: a lane's bytes, row g in x, y and row g + 8 in z, w. `scales`: row g's E4M3 byte in bits 0 - 7, row g + 8's
/// in bits 8 - 15.
__device__ __forceinline__ void dequantize(uint4 const& codes, uint32_t scales, uint32_t (&a)[4][4]) {
    constexpr uint32_t TWO_POW_119 = 0x7B007B00u; // exponent field 119 + 127 = 246
    // The E4M3 bytes into the places of two BF16 values: exponent and mantissa to bits 10 .. 4.
    uint32_t factors = __byte_perm(scales, 0, 0x4140) << 4;
    factors = detail::multiply(detail::multiply(factors, TWO_POW_119), TWO_POW_119);
    uint32_t const low = __byte_perm(factors, 0, 0x1010);  // row g
    uint32_t const high = __byte_perm(factors, 0, 0x3232); // row g + 8
    uint32_t const words[2][2] = {{codes.x, codes.y}, {codes.z, codes.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t const factor = half == 0 ? low : high;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            uint32_t const w = words[half][word];
            a[2 * word][half] = detail::multiply(detail::placeE2m1<0>(w), factor);
            a[2 * word][2 + half] = detail::multiply(detail::placeE2m1<1>(w), factor);
            a[2 * word + 1][half] = detail::multiply(detail::placeE2m1<2>(w), factor);
            a[2 * word + 1][2 + half] = detail::multiply(detail::placeE2m1<3>(w), factor);
        }
    }
}

} // namespace flint
