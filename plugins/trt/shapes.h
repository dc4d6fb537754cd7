// Output shapes as TensorRT's symbolic expressions.
#pragma once

#include "trt/node.h"

#include <NvInferRuntime.h>

namespace flint {

/// Write the shapes of the node's outputs as expressions of its inputs' shapes. Throws SchemaError where a rank, or
/// dimensions that are already constant, contradict the schema.
void outputShapes(Node const& node, nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                  nvinfer1::IExprBuilder& builder);

} // namespace flint
