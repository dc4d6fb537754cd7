// One plugin creator per op.
#pragma once

#include <NvInferRuntime.h>

#include <span>

namespace flint {

/// The creators of all ops; they live as long as the library.
std::span<nvinfer1::IPluginCreatorInterface* const> creators();

} // namespace flint
