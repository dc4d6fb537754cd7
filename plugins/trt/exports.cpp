// The library's only visible symbols: the two that TensorRT's plugin registry looks for, and one for Python.
#include "build_info.h"
#include "ops_schema.h"
#include "trt/creators.h"
#include "trt/log.h"

#include <string>

#define FLINT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::string describeLibrary() {
    std::string ops;
    for (flint::Op const& op : flint::allOps()) {
        ops += std::string(ops.empty() ? "" : ", ") + "\"" + op.name + "\": \"" + flint::kOP_VERSION + "\"";
    }
    std::string const header = std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR) + "." +
                               std::to_string(NV_TENSORRT_PATCH);
    return std::string("{\"version\": \"") + flint::kVERSION + "\", \"architectures\": [" + flint::kARCHITECTURES_JSON +
           "], \"header_version\": \"" + header + "\", \"layout_version\": " + std::to_string(flint::kLAYOUT_VERSION) +
           ", \"ops\": {" + ops + "}}";
}

} // namespace

FLINT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators) {
    nbCreators = 0;
    return flint::guarded<nvinfer1::IPluginCreatorInterface* const*>(nullptr, "getCreators", [&] {
        auto const all = flint::creators();
        nbCreators = static_cast<int32_t>(all.size());
        return all.data();
    });
}

FLINT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    flint::setLoggerFinder(finder);
}

/// What this library is, as JSON (read by flint_plugins/library.py): version, architectures it has machine code for,
/// version of the TensorRT headers, version of the packed weights' layout, ops with their versions. Needs no GPU.
FLINT_EXPORT char const* flintPluginsInfo() {
    static std::string const info = describeLibrary();
    return info.c_str();
}
