// Launching with programmatic dependent launch: a kernel may start while its predecessor still runs, prefetch what does
// not depend on it (weights), and wait (`waitForPredecessor`, device.cuh) before it reads or writes anything else
// (GemmReady::kAll says when a product may wait later).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace flint {

/// Launch `kernel` so that it overlaps its predecessor's tail, `cluster` blocks in x forming a thread block cluster;
/// one block alone forms none, and must do without its instructions. The kernel must call waitForPredecessor() before
/// it touches any activation (but for those that were complete when its predecessor called allowSuccessor), and every
/// kernel of the stream must call it, or an earlier one's writes may not be visible.
template <typename... Params, typename... Args>
cudaError_t launchCluster(void (*kernel)(Params...), dim3 grid, dim3 block, unsigned cluster, size_t sharedBytes,
                          cudaStream_t stream, Args&&... args) {
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = sharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...);
}

/// The same without clusters.
template <typename... Params, typename... Args>
cudaError_t launchOverlapped(void (*kernel)(Params...), dim3 grid, dim3 block, size_t sharedBytes, cudaStream_t stream,
                             Args&&... args) {
    return launchCluster(kernel, grid, block, 1, sharedBytes, stream, std::forward<Args>(args)...);
}

/// Let a kernel use this much dynamic shared memory: beside its static one, more than 48 KB in all must be allowed.
/// Cheap; called before each launch that needs it.
template <typename Kernel>
cudaError_t allowShared(Kernel kernel, size_t sharedBytes) {
    if (sharedBytes <= 16 * 1024) {
        return cudaSuccess;
    }
    return cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(sharedBytes));
}

/// The least third of a multiprocessor's shared memory that launchSpread takes: compute capability 9.0 and 10.0 have
/// 76 KB, 12.x has 33.
constexpr size_t kSPREAD_BYTES = 64 * 1024;

/// Launch a kernel that has a block or so for each multiprocessor, `spread` over them; else as launchOverlapped does.
///
/// Several kernels of a decode step are in flight, for the one that a kernel waits for may still be waiting itself, and
/// their blocks crowd where they find room: of a kernel with a block for nearly each of an H200's multiprocessors, 21
/// had three blocks and 66 none. So each block takes at least a third of a multiprocessor's shared memory, beside the
/// little that every block needs: at most two have room. Not where a third is little: windows' blocks need theirs.
template <typename... Params, typename... Args>
cudaError_t launchSpread(bool spread, void (*kernel)(Params...), dim3 grid, dim3 block, size_t sharedBytes,
                         cudaStream_t stream, Args&&... args) {
    int device = 0, all = 0;
    cudaFuncAttributes attributes{};
    for (cudaError_t const status :
         {cudaGetDevice(&device), cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          cudaFuncGetAttributes(&attributes, kernel)}) {
        if (status != cudaSuccess) {
            return status;
        }
    }
    size_t const third = static_cast<size_t>(all) / 3, fixed = attributes.sharedSizeBytes;
    bool const pads = spread && third >= kSPREAD_BYTES && fixed + sharedBytes < third;
    size_t const bytes = pads ? third - fixed : sharedBytes;
    if (cudaError_t const status = allowShared(kernel, bytes); status != cudaSuccess) {
        return status;
    }
    return launchOverlapped(kernel, grid, block, bytes, stream, std::forward<Args>(args)...);
}

/// How many clusters of a kernel can be resident together on this GPU, at least 1.
template <typename Kernel>
cudaError_t residentClusters(Kernel kernel, dim3 block, unsigned cluster, size_t sharedBytes, int& clusters) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster);
    config.blockDim = block;
    config.dynamicSmemBytes = sharedBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t const status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    clusters = clusters > 1 ? clusters : 1;
    return status;
}

/// Shared memory that a block can have on every GPU we compile for: the 99 KB of compute capability 12.x.
constexpr size_t kCOMMON_SHARED_BYTES = 99 * 1024;

/// Shared memory that a block can have on this GPU, static and dynamic together.
inline cudaError_t blockSharedBytes(int& bytes) {
    int device = 0;
    cudaError_t const status = cudaGetDevice(&device);
    return status != cudaSuccess ? status
                                 : cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

} // namespace flint
