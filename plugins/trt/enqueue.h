// The table from op to launcher: what the generic adapter calls, and where a new kernel is hooked in.
//
// To add a kernel: write plugins/kernels/foo.{h,cu} (params struct, launchFoo) and plugins/trt/ops/foo.cpp (a function
// that fills the params from `EnqueueArgs`), declare that function in ops/ops.h, add a line to the table in enqueue.cpp
// and the two sources to plugins/CMakeLists.txt.
#pragma once

#include "trt/node.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string_view>

namespace flint {

/// What a launcher gets: the node, its symbols for the present shapes, and device pointers in the node's order.
struct EnqueueArgs {
    Node const& node;
    Symbols const& symbols;
    std::vector<DTypeMask> const& inputTypes;
    void const* const* inputs;
    void* const* outputs;
    void* workspace;
    cudaStream_t stream;

    /// A binding by name; nullptr where this node does not have it.
    template <typename T>
    T const* input(std::string_view name) const {
        int const index = node.inputIndex(name);
        return index < 0 ? nullptr : static_cast<T const*>(inputs[index]);
    }

    /// Whether a binding that may have several types has this one.
    bool inputIs(std::string_view name, DType type) const {
        int const index = node.inputIndex(name);
        return index >= 0 && inputTypes[index] == maskOf(type);
    }

    template <typename T>
    T* output(std::string_view name) const {
        int const index = node.outputIndex(name);
        return index < 0 ? nullptr : static_cast<T*>(outputs[index]);
    }
};

struct Kernel {
    cudaError_t (*enqueue)(EnqueueArgs const&);
    /// Bytes of workspace for these symbols; nullptr: none. The largest shapes of a profile must need the most.
    size_t (*workspaceBytes)(Node const&, Symbols const&);
};

/// The kernel of an op, or nullptr where this build has none.
Kernel const* findKernel(std::string_view op);

} // namespace flint
