// How the host's parts fail: an exception that the C ABI turns into a message.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flint::host {

/// What the caller is told through flintHostLastError.
struct HostError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Throw unless a CUDA call succeeded.
inline void checkCuda(cudaError_t status, char const* what) {
    if (status != cudaSuccess) {
        cudaGetLastError(); // The error has been reported: do not let the next call find it again.
        throw HostError(std::string(what) + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
    }
}

} // namespace flint::host
