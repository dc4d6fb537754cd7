#include "trt/plugin.h"

#include "trt/enqueue.h"
#include "trt/fields.h"
#include "trt/log.h"
#include "trt/shapes.h"

#include <utility>

namespace flint {

namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr std::pair<DType, DataType> kTYPES[] = {
    {DType::kBF16, DataType::kBF16},
    {DType::kF32, DataType::kFLOAT},
    {DType::kI32, DataType::kINT32},
    {DType::kI8, DataType::kINT8},
};

/// The bit of a type that ops use, or 0.
DTypeMask dtypeMask(DataType type) {
    for (auto const& [ours, theirs] : kTYPES) {
        if (type == theirs) {
            return maskOf(ours);
        }
    }
    return 0;
}

DataType dataType(DTypeMask mask) {
    for (auto const& [ours, theirs] : kTYPES) {
        if (mask & maskOf(ours)) {
            return theirs;
        }
    }
    throw SchemaError("no such type");
}

std::string typeName(DataType type) {
    DTypeMask const mask = dtypeMask(type);
    return mask ? dtypeNames(mask) : "TensorRT DataType " + std::to_string(static_cast<int>(type));
}

Shape shapeOf(Dims const& dims) {
    return dims.nbDims > 0 ? Shape(dims.d, dims.d + dims.nbDims) : Shape{};
}

} // namespace

std::string nodeName(Op const& op, char const* layer) {
    std::string name = std::string(kNAMESPACE) + "::" + op.name;
    return layer && *layer ? name + " (layer " + layer + ")" : name;
}

FlintPlugin::FlintPlugin(Node node, std::string layer)
    : mNode(std::move(node)), mLayer(std::move(layer)), mWho(nodeName(mNode.op(), mLayer.c_str())) {}

// The serialised fields point into the node, so a copy makes its own.
FlintPlugin::FlintPlugin(FlintPlugin const& other)
    : nvinfer1::IPluginV3(other), nvinfer1::IPluginV3OneCore(other), nvinfer1::IPluginV3OneBuildV2(other),
      nvinfer1::IPluginV3OneRuntime(other), mNode(other.mNode), mLayer(other.mLayer), mWho(other.mWho),
      mSymbols(other.mSymbols) {}

// --- IPluginV3 ----------------------------------------------------------------------------------------------------

nvinfer1::IPluginCapability* FlintPlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* FlintPlugin::clone() noexcept {
    return guarded<FlintPlugin*>(nullptr, mWho, [&] { return new FlintPlugin(*this); });
}

// --- IPluginV3OneCore ---------------------------------------------------------------------------------------------

char const* FlintPlugin::getPluginName() const noexcept {
    return mNode.op().name;
}

char const* FlintPlugin::getPluginVersion() const noexcept {
    return kOP_VERSION;
}

char const* FlintPlugin::getPluginNamespace() const noexcept {
    return kNAMESPACE;
}

// --- IPluginV3OneBuildV2 ------------------------------------------------------------------------------------------

int32_t FlintPlugin::getNbOutputs() const noexcept {
    return static_cast<int32_t>(mNode.outputs().size());
}

int32_t FlintPlugin::getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                        int32_t nbInputs) const noexcept {
    return guarded(-1, mWho, [&] {
        mNode.checkCounts(nbInputs, nbOutputs);
        for (int32_t i = 0; i < nbInputs; ++i) {
            mNode.checkInputType(i, dtypeMask(inputTypes[i]), typeName(inputTypes[i]));
        }
        for (int32_t i = 0; i < nbOutputs; ++i) {
            outputTypes[i] = dataType(mNode.outputs()[i]->dtypes);
        }
        return 0;
    });
}

int32_t FlintPlugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const*,
                                     int32_t, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
                                     nvinfer1::IExprBuilder& exprBuilder) noexcept {
    return guarded(-1, mWho, [&] {
        mNode.checkCounts(nbInputs, nbOutputs);
        outputShapes(mNode, inputs, outputs, exprBuilder);
        return 0;
    });
}

bool FlintPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                            int32_t nbOutputs) noexcept {
    return guarded(false, mWho, [&] {
        mNode.checkCounts(nbInputs, nbOutputs);
        auto const* binding = pos < nbInputs ? mNode.inputs()[pos] : mNode.outputs()[pos - nbInputs];
        PluginTensorDesc const& desc = inOut[pos].desc;
        return desc.format == nvinfer1::TensorFormat::kLINEAR && (binding->dtypes & dtypeMask(desc.type)) != 0;
    });
}

Symbols FlintPlugin::solveCorner(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                 Dims DynamicPluginTensorDesc::* corner) const {
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < nbInputs; ++i) {
        shapes.push_back(shapeOf(in[i].*corner));
    }
    return mNode.solve(shapes);
}

int32_t FlintPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                     DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept {
    return guarded(-1, mWho, [&] {
        mNode.checkCounts(nbInputs, nbOutputs);
        for (int32_t i = 0; i < nbInputs; ++i) {
            mNode.checkInputType(i, dtypeMask(in[i].desc.type), typeName(in[i].desc.type));
        }
        for (auto corner :
             {&DynamicPluginTensorDesc::min, &DynamicPluginTensorDesc::opt, &DynamicPluginTensorDesc::max}) {
            solveCorner(in, nbInputs, corner);
        }
        return 0;
    });
}

size_t FlintPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
                                     DynamicPluginTensorDesc const*, int32_t) const noexcept {
    return guarded<size_t>(0, mWho, [&]() -> size_t {
        Kernel const* kernel = findKernel(mNode.op().name);
        if (!kernel || !kernel->workspaceBytes) {
            return 0;
        }
        return kernel->workspaceBytes(mNode, solveCorner(inputs, nbInputs, &DynamicPluginTensorDesc::max));
    });
}

int32_t FlintPlugin::getAliasedInput(int32_t outputIndex) noexcept {
    auto const& aliases = mNode.aliases();
    return outputIndex >= 0 && outputIndex < static_cast<int32_t>(aliases.size()) ? aliases[outputIndex] : -1;
}

// --- IPluginV3OneRuntime ------------------------------------------------------------------------------------------

int32_t FlintPlugin::onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out,
                                   int32_t nbOutputs) noexcept {
    mSymbols.reset();
    return guarded(-1, mWho, [&] {
        mNode.checkCounts(nbInputs, nbOutputs);
        std::vector<Shape> inputs, outputs;
        for (int32_t i = 0; i < nbInputs; ++i) {
            mNode.checkInputType(i, dtypeMask(in[i].type), typeName(in[i].type));
            inputs.push_back(shapeOf(in[i].dims));
        }
        for (int32_t i = 0; i < nbOutputs; ++i) {
            outputs.push_back(shapeOf(out[i].dims));
        }
        Symbols const symbols = mNode.solve(inputs);
        mNode.checkOutputs(outputs, symbols);
        mInputTypes.clear();
        for (int32_t i = 0; i < nbInputs; ++i) {
            mInputTypes.push_back(dtypeMask(in[i].type));
        }
        mSymbols = symbols;
        return 0;
    });
}

int32_t FlintPlugin::enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const* inputs,
                             void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    try {
        Kernel const* kernel = findKernel(mNode.op().name);
        if (!kernel) {
            logError(mWho + " has no CUDA kernel in this build");
            return cudaErrorNotSupported;
        }
        if (!mSymbols) {
            logError(mWho + ": enqueue without a valid onShapeChange");
            return cudaErrorInvalidValue;
        }
        cudaError_t const status = kernel->enqueue({mNode, *mSymbols, mInputTypes, inputs, outputs, workspace, stream});
        if (status != cudaSuccess) {
            logError(mWho + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
        }
        return status;
    } catch (std::exception const& error) {
        logError(mWho + ": " + error.what());
    } catch (...) {
        logError(mWho + ": unknown exception");
    }
    return cudaErrorUnknown;
}

nvinfer1::IPluginV3* FlintPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    return clone();
}

nvinfer1::PluginFieldCollection const* FlintPlugin::getFieldsToSerialize() noexcept {
    return guarded<nvinfer1::PluginFieldCollection const*>(nullptr, mWho, [&] {
        mSerialized = serializedFields(mNode);
        mSerializedCollection = {static_cast<int32_t>(mSerialized.size()), mSerialized.data()};
        return &mSerializedCollection;
    });
}

} // namespace flint
