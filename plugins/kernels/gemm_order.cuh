// The order of K in which prefill's matrix products read activations, and that their producers write.
//
// A dequantised panel (panel.cuh) gives lane t of a quad columns 16t .. 16t + 15 of a 64-column tile, four of them per
// k16 instruction. Both tensor-core paths take the other operand from shared memory as rows of K in which instruction
// i owns positions 16i .. 16i + 15, and its lane t positions 2t, 2t + 1 (pair 0) and 2t + 8, 2t + 9 (pair 1). So the
// order runs over the whole tile: one order serves ldmatrix + mma.sync and wgmma's 128-byte-swizzled descriptors.
#pragma once

#include "kernels/panel.cuh"

namespace flint {

/// Position in a 64-column tile of an ordered activation row of column `column` (0 .. 63) of the plain row.
///
/// A producer with 8 consecutive columns 8j .. 8j + 7 writes four BF16 pairs: (8j + c, 8j + c + 2), c = 0, 1, 4, 5,
/// stand at positions gemmOrder(8j + c) and the next. For each c, 8 lanes with j = 0 .. 7 fill one 32-byte sector.
__host__ __device__ constexpr int gemmOrder(int column) {
    int const value = activationOrder(column % 16); // instruction * 4 + pair * 2 + element
    return (value / 4) * 16 + (value / 2 % 2) * 8 + (column / 16) * 2 + value % 2;
}

} // namespace flint
