// Reductions over a warp and over the one block of kTHREADS that works on a row, with fixed results: integers only.
#pragma once

#include "kernels/device.cuh"

#include <cstdint>

namespace flint::sample {

// 512: with 64 registers each, a block fits beside the blocks of the kernel before it, so that its launch overlaps.
constexpr int kTHREADS = 512;
constexpr int kWARPS = kTHREADS / kWARP;
constexpr uint32_t kALL = 0xFFFFFFFFu;

__device__ __forceinline__ uint64_t warpSum64(uint64_t x) {
#pragma unroll
    for (int mask = kWARP / 2; mask > 0; mask /= 2) {
        x += __shfl_xor_sync(kALL, x, mask);
    }
    return x;
}

/// Sum of this and all lower lanes.
__device__ __forceinline__ uint64_t warpInclusiveSum64(uint64_t x) {
    int const lane = threadIdx.x % kWARP;
#pragma unroll
    for (int step = 1; step < kWARP; step *= 2) {
        uint64_t const below = __shfl_up_sync(kALL, x, step);
        x += lane >= step ? below : 0;
    }
    return x;
}

/// Lane w gets what warp w has left in `shared` [kWARPS], the lanes beyond nothing.
template <typename T>
__device__ __forceinline__ T ofWarp(T const* shared) {
    int const lane = threadIdx.x % kWARP;
    return lane < kWARPS ? shared[lane] : T{};
}

/// `shared` [kWARPS] is free again only after the caller's next barrier; so for all of these.
__device__ __forceinline__ uint32_t blockMax(uint32_t x, uint32_t* shared) {
    x = __reduce_max_sync(kALL, x);
    if (threadIdx.x % kWARP == 0) {
        shared[threadIdx.x / kWARP] = x;
    }
    __syncthreads();
    return __reduce_max_sync(kALL, ofWarp(shared));
}

/// The same in every thread: each warp adds the warps' sums in the same order.
__device__ __forceinline__ float blockSum(float x, float* shared) {
    x = warpSum(x);
    if (threadIdx.x % kWARP == 0) {
        shared[threadIdx.x / kWARP] = x;
    }
    __syncthreads();
    return warpSum(ofWarp(shared));
}

__device__ __forceinline__ int blockCount(int x, uint32_t* shared) {
    uint32_t const sum = __reduce_add_sync(kALL, static_cast<uint32_t>(x));
    if (threadIdx.x % kWARP == 0) {
        shared[threadIdx.x / kWARP] = sum;
    }
    __syncthreads();
    return static_cast<int>(__reduce_add_sync(kALL, ofWarp(shared)));
}

/// Sum over all lower threads; `total` over all.
__device__ __forceinline__ uint64_t blockExclusiveSum64(uint64_t x, uint64_t* shared, uint64_t& total) {
    int const lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP;
    uint64_t const inclusive = warpInclusiveSum64(x);
    if (lane == kWARP - 1) {
        shared[warp] = inclusive;
    }
    __syncthreads();
    uint64_t const warps = warpInclusiveSum64(ofWarp(shared));
    total = __shfl_sync(kALL, warps, kWARP - 1);
    uint64_t const lower = __shfl_sync(kALL, warps, warp == 0 ? 0 : warp - 1);
    return (warp == 0 ? 0 : lower) + inclusive - x;
}

} // namespace flint::sample
