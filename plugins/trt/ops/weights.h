// What the ops with packed weights share.
#pragma once

#include "kernels/types.h"
#include "trt/enqueue.h"

#include <stdexcept>
#include <string>

namespace flint {

inline WeightFormat weightFormat(Node const& node) {
    return node.strField("weights") == "nvfp4" ? WeightFormat::kNVFP4 : WeightFormat::kBF16;
}

inline int intSymbol(EnqueueArgs const& args, Symbol symbol) {
    return static_cast<int>(args.symbols[symbol]);
}

/// Turn a launcher's refusal of a shape into a message; `shapes` says what this build has.
inline cudaError_t orRefuse(cudaError_t status, char const* shapes) {
    if (status == cudaErrorInvalidValue) {
        throw std::invalid_argument(std::string("no kernel for these shapes; this build has instances for ") + shapes);
    }
    return status;
}

} // namespace flint
