// The matrix-product kernel, dense or grouped, and its launch. Included once per weight format.
#pragma once

#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_load.cuh"
#include "kernels/gemm_mma.cuh"
#include "kernels/gemm_wgmma.cuh"
#include "kernels/launch.h"

#include <algorithm>

namespace flint {

namespace detail {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHAS_WGMMA = true;
#else
constexpr bool kHAS_WGMMA = false;
#endif

template <typename C>
__device__ __forceinline__ void clear(float (&acc)[C::PANELS][C::TOKENS / 8][4]) {
#pragma unroll
    for (int p = 0; p < C::PANELS; ++p) {
#pragma unroll
        for (int n = 0; n < C::TOKENS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                acc[p][n][i] = 0.0f;
            }
        }
    }
}

/// Where a block stands in its sequence of K-tiles, beside the loader that runs ahead.
template <typename C>
struct GemmState {
    GemmLoader<C> loader;
    GemmWeights<C> weights;
    uint32_t shared;
    uint8_t* out;
    int stage = 0;
    int warp, lane;
};

/// Make output tile `index`, of `count` <= TOKENS positions.
template <typename C, int TOKENS>
__device__ __forceinline__ void gemmTile(GemmProblem const& problem, GemmSchedule<C> const& schedule, unsigned index,
                                         int count, GemmState<C>& state) {
    float acc[C::PANELS][C::TOKENS / 8][4];
    if constexpr (!C::WGMMA) {
        clear<C>(acc);
    }
    for (int tile = 0; tile < state.loader.tiles; ++tile) {
        waitCopies<C::AHEAD - 1>();
        if constexpr (C::WGMMA) {
            fenceCopies();
        }
        __syncthreads(); // this K-tile is there for all, and the stage that step() refills is read no more
        state.loader.step();
        if constexpr (C::WGMMA) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
            multiplyTileWgmma<C, TOKENS>(acc, state.weights, state.shared, state.stage, tile > 0);
#endif
        } else {
            multiplyTile(acc, state.weights, state.shared, state.stage, count, state.lane);
        }
        state.weights.advance();
        state.stage = state.stage + 1 == C::STAGES ? 0 : state.stage + 1;
    }
    if (index + gridDim.x >= schedule.total) {
        allowSuccessor();
    }
    GemmWork const work = schedule.work(index); // again, rather than in registers all the time
    if constexpr (C::WGMMA) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        wgmmaWait<0>();
#endif
    }
    GemmStore<C, TOKENS>(problem, work, state.warp).run(problem, work, acc, state.out, state.warp, state.lane);
}

} // namespace detail

/// Grid: as many blocks as fit the GPU; block b makes output tiles b, b + gridDim.x, ...
template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS) gemmKernel(GemmProblem const __grid_constant__ problem) {
    if constexpr (!C::WGMMA || detail::kHAS_WGMMA) {
        extern __shared__ __align__(1024) uint8_t buffer[];
        uint32_t const shared = sharedAddress(buffer);
        int const warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / kWARP, 0);
        int const lane = static_cast<int>(threadIdx.x) % kWARP;
        if (gemmReady<C>(problem) == GemmReady::kNothing) {
            waitForPredecessor();
        }
        GemmSchedule<C> const schedule(problem);
        GemmLoader<C> const loader(schedule, shared, warp, lane);
        detail::GemmState<C> state{
            loader, GemmWeights<C>(shared, warp, lane, loader.tiles), shared, buffer + C::OUT_OFFSET, 0, warp, lane};
        state.loader.start();
        for (unsigned index = blockIdx.x; index < schedule.total; index += gridDim.x) {
            int const count = schedule.work(index).count;
            if constexpr (C::WGMMA) {
                // Half-empty tiles take an instruction half as wide. (32 and 96 too would need more registers than
                // there are: ptxas then waits after each instruction.)
                if (count > 64) {
                    detail::gemmTile<C, 128>(problem, schedule, index, count, state);
                } else {
                    detail::gemmTile<C, 64>(problem, schedule, index, count, state);
                }
            } else {
                detail::gemmTile<C, C::TOKENS>(problem, schedule, index, count, state);
            }
        }
        if (gemmReady<C>(problem) == GemmReady::kAll) {
            allowSuccessor();     // of a block without a tile, too
            waitForPredecessor(); // this kernel's end tells that the one before it has ended, too
        }
    }
}

namespace detail {

template <typename C>
cudaError_t launchGemmConfig(GemmProblem const& problem, int64_t maxGroups, cudaStream_t stream) {
    auto const kernel = gemmKernel<C>;
    cudaError_t status = allowShared(kernel, C::SHARED_BYTES);
    int device = 0, processors = 0, blocks = 0;
    if (status == cudaSuccess) {
        status = cudaGetDevice(&device);
    }
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    if (status == cudaSuccess) {
        status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, C::THREADS, C::SHARED_BYTES);
    }
    if (status != cudaSuccess) {
        return status;
    }
    int64_t const tiles = maxGroups * ((problem.panels + C::BLOCK_PANELS - 1) / C::BLOCK_PANELS);
    int64_t const grid = std::min<int64_t>(tiles, static_cast<int64_t>(processors) * std::max(blocks, 1));
    return launchOverlapped(kernel, dim3(static_cast<unsigned>(grid)), dim3(C::THREADS), C::SHARED_BYTES, stream,
                            problem);
}

template <WeightFormat F, GemmEpilogue E>
cudaError_t launchGemmEpilogue(GemmProblem const& problem, GemmShape shape, int64_t maxGroups, cudaStream_t stream) {
    switch (shape) {
    case GemmShape::kTiny:
        return launchGemmConfig<GemmTiny<F, E>>(problem, maxGroups, stream);
    case GemmShape::kSmall:
        return launchGemmConfig<GemmSmall<F, E>>(problem, maxGroups, stream);
    case GemmShape::kMedium:
        return launchGemmConfig<GemmMedium<F, E>>(problem, maxGroups, stream);
    case GemmShape::kLarge:
        break;
    }
    int device = 0, major = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (status != cudaSuccess) {
        return status;
    }
    if (major == 9) {
        return launchGemmConfig<GemmLargeWgmma<F, E>>(problem, maxGroups, stream);
    }
    return launchGemmConfig<GemmLarge<F, E>>(problem, maxGroups, stream);
}

template <WeightFormat F>
cudaError_t launchGemmFormat(GemmProblem const& problem, GemmEpilogue epilogue, GemmShape shape, int64_t maxGroups,
                             cudaStream_t stream) {
    return epilogue == GemmEpilogue::kStore
               ? launchGemmEpilogue<F, GemmEpilogue::kStore>(problem, shape, maxGroups, stream)
               : launchGemmEpilogue<F, GemmEpilogue::kSwiGlu>(problem, shape, maxGroups, stream);
}

} // namespace detail

} // namespace flint
