// A prefix sum over a block.
#pragma once

#include "kernels/device.cuh"

namespace flint {

/// Inclusive sum over the block's threads. `sums`: a value of shared memory for each warp.
__device__ __forceinline__ int blockScan(int value, int* sums) {
    int const lane = static_cast<int>(threadIdx.x) % kWARP, warp = static_cast<int>(threadIdx.x) / kWARP;
#pragma unroll
    for (int step = 1; step < kWARP; step *= 2) {
        int const before = __shfl_up_sync(0xFFFFFFFFu, value, step);
        value += lane >= step ? before : 0;
    }
    __syncthreads();
    if (lane == kWARP - 1) {
        sums[warp] = value;
    }
    __syncthreads();
    for (int i = 0; i < warp; ++i) {
        value += sums[i];
    }
    return value;
}

} // namespace flint
