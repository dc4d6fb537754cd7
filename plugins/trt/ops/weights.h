// What the ops with packed weights share.
#pragma once

#include "kernels/types.h"
#include "trt/enqueue.h"

namespace flint {

inline WeightFormat weightFormat(Node const& node) {
    return node.strField("weights") == "nvfp4" ? WeightFormat::kNVFP4 : WeightFormat::kBF16;
}

inline int intSymbol(EnqueueArgs const& args, Symbol symbol) {
    return static_cast<int>(args.symbols[symbol]);
}

} // namespace flint
