// Plugin fields: from TensorRT's form to a node's values and back.
#pragma once

#include "trt/node.h"

#include <NvInferRuntime.h>

#include <vector>

namespace flint {

/// The op's fields as TensorRT asks a creator for them: names and types, without values.
std::vector<nvinfer1::PluginField> fieldNames(Op const& op);

/// The node that a collection of fields describes. Throws SchemaError for a missing, unknown or ill-typed field.
Node parseFields(Op const& op, nvinfer1::PluginFieldCollection const& collection);

/// The node's fields with their values. They point into `node`, which must outlive them.
std::vector<nvinfer1::PluginField> serializedFields(Node const& node);

} // namespace flint
