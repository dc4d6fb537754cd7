// Launching with programmatic dependent launch: a kernel may start while its predecessor still runs, prefetch what does
// not depend on it (weights), and wait (`waitForPredecessor`, device.cuh) before it reads or writes anything else.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace flint {

/// Launch `kernel` so that it overlaps its predecessor's tail. The kernel must call waitForPredecessor() before it
/// touches any activation, and every kernel of the stream must call it, or an earlier one's writes may not be visible.
template <typename... Params, typename... Args>
cudaError_t launchOverlapped(void (*kernel)(Params...), dim3 grid, dim3 block, size_t sharedBytes, cudaStream_t stream,
                             Args&&... args) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = sharedBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...);
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

} // namespace flint
