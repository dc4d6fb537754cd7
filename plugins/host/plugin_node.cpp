#include "host/plugin_node.h"

#include "host/errors.h"
#include "trt/creators.h"
#include "trt/log.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace flint::host {

namespace {

using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

nvinfer1::IPluginCreatorV3One* findCreator(std::string const& op) {
    for (auto* interface : creators()) {
        auto* creator = static_cast<nvinfer1::IPluginCreatorV3One*>(interface);
        if (op == creator->getPluginName()) {
            return creator;
        }
    }
    return nullptr;
}

std::vector<PluginField> pluginFields(std::vector<NamedField> const& fields) {
    std::vector<PluginField> result;
    for (NamedField const& field : fields) {
        if (auto const* text = std::get_if<std::string>(&field.value)) {
            result.emplace_back(field.name.c_str(), text->data(), PluginFieldType::kCHAR,
                                static_cast<int32_t>(text->size()));
        } else if (auto const* integer = std::get_if<int32_t>(&field.value)) {
            result.emplace_back(field.name.c_str(), integer, PluginFieldType::kINT32, 1);
        } else {
            result.emplace_back(field.name.c_str(), std::get_if<float>(&field.value), PluginFieldType::kFLOAT32, 1);
        }
    }
    return result;
}

/// The three field types of our ops; what a plan file holds of a field.
NamedField copyField(PluginField const& field) {
    if (field.type == PluginFieldType::kCHAR) {
        return {field.name, std::string(static_cast<char const*>(field.data), field.length)};
    }
    if (field.type == PluginFieldType::kINT32 && field.length == 1) {
        int32_t value;
        std::memcpy(&value, field.data, sizeof value);
        return {field.name, value};
    }
    if (field.type == PluginFieldType::kFLOAT32 && field.length == 1) {
        float value;
        std::memcpy(&value, field.data, sizeof value);
        return {field.name, value};
    }
    throw HostError(std::string("serialised field ") + field.name + " has a type that the host does not know");
}

} // namespace

void PluginNode::fail(std::string const& problem, std::string const& logged) const {
    // Our plugins' messages name the node themselves.
    throw HostError(logged.empty() ? mWho + ": " + problem : problem + ": " + logged);
}

/// Call one of the plugin's functions, noting its name; `body` returns whether it succeeded.
template <typename Body>
auto PluginNode::call(char const* function, Body&& body) {
    if (std::find(mLifeCycle.begin(), mLifeCycle.end(), function) == mLifeCycle.end()) {
        mLifeCycle.push_back(function);
    }
    LogCapture log;
    auto result = body();
    using Result = decltype(result);
    bool succeeded;
    if constexpr (std::is_pointer_v<Result>) {
        succeeded = result != nullptr;
    } else if constexpr (std::is_same_v<Result, int32_t>) {
        succeeded = result == 0;
    } else {
        succeeded = static_cast<bool>(result);
    }
    if (!succeeded) {
        fail(std::string(function) + " failed", log.text());
    }
    if (!log.text().empty()) {
        fail(std::string(function) + " reported an error", log.text());
    }
    return result;
}

template <typename T>
T* PluginNode::capability(nvinfer1::IPluginV3& plugin, PluginCapabilityType type) {
    auto* found = call("getCapabilityInterface", [&] { return plugin.getCapabilityInterface(type); });
    return static_cast<T*>(found);
}

PluginNode::Plugin PluginNode::create(PluginFieldCollection const& fields, TensorRTPhase phase) {
    char const* function = phase == TensorRTPhase::kBUILD ? "createPlugin(build)" : "createPlugin(runtime)";
    return Plugin(call(function, [&] { return mCreator->createPlugin(mLayer.c_str(), &fields, phase); }));
}

PluginNode::PluginNode(std::string const& op, std::string layer, std::vector<NamedField> const& fields)
    : mLayer(std::move(layer)), mWho("node " + mLayer + " (" + op + ")"), mCreator(findCreator(op)) {
    if (!mCreator) {
        throw HostError(mWho + ": this library has no such op");
    }
    auto const values = pluginFields(fields);
    Plugin const given = create({static_cast<int32_t>(values.size()), values.data()}, TensorRTPhase::kBUILD);
    // A network owns a copy, and the caller's plugin may go.
    mBuildPlugin = Plugin(call("clone", [&] { return given->clone(); }));
    mBuild = capability<nvinfer1::IPluginV3OneBuild>(*mBuildPlugin, PluginCapabilityType::kBUILD);
    auto const info = mBuild->getInterfaceInfo();
    if (std::strcmp(info.kind, "PLUGIN_V3ONE_BUILD") == 0 && info.major >= 2) {
        mBuildV2 = static_cast<nvinfer1::IPluginV3OneBuildV2*>(mBuild);
    }
}

int PluginNode::outputCount() {
    int32_t count = 0;
    call("getNbOutputs", [&] { return (count = mBuild->getNbOutputs()) > 0; });
    return count;
}

std::vector<nvinfer1::DataType> PluginNode::outputTypes(std::vector<nvinfer1::DataType> const& inputs, int outputs) {
    std::vector<nvinfer1::DataType> types(outputs);
    call("getOutputDataTypes", [&] {
        return mBuild->getOutputDataTypes(types.data(), outputs, inputs.data(), static_cast<int32_t>(inputs.size()));
    });
    return types;
}

std::vector<nvinfer1::DimsExprs> PluginNode::outputShapes(std::vector<nvinfer1::DimsExprs> const& inputs, int outputs,
                                                          nvinfer1::IExprBuilder& builder) {
    std::vector<nvinfer1::DimsExprs> shapes(outputs);
    call("getOutputShapes", [&] {
        return mBuild->getOutputShapes(inputs.data(), static_cast<int32_t>(inputs.size()), nullptr, 0, shapes.data(),
                                       outputs, builder);
    });
    return shapes;
}

std::vector<int> PluginNode::aliases(int inputs, int outputs) {
    std::vector<int> result(outputs, -1);
    if (!mBuildV2) {
        return result;
    }
    for (int output = 0; output < outputs; ++output) {
        call("getAliasedInput", [&] {
            result[output] = mBuildV2->getAliasedInput(output);
            return result[output] >= -1 && result[output] < inputs;
        });
    }
    return result;
}

size_t PluginNode::configure(std::vector<nvinfer1::DynamicPluginTensorDesc> const& bindings, int inputs) {
    int32_t const outputs = static_cast<int32_t>(bindings.size()) - inputs;
    for (int32_t i = 0; i < inputs + outputs; ++i) {
        call("supportsFormatCombination",
             [&] { return mBuild->supportsFormatCombination(i, bindings.data(), inputs, outputs); });
    }
    call("configurePlugin",
         [&] { return mBuild->configurePlugin(bindings.data(), inputs, bindings.data() + inputs, outputs); });
    size_t bytes = 0;
    call("getWorkspaceSize", [&] {
        bytes = mBuild->getWorkspaceSize(bindings.data(), inputs, bindings.data() + inputs, outputs);
        return true;
    });
    return bytes;
}

void PluginNode::makeRuntime() {
    mContextPlugin.reset();
    mEnginePlugin.reset();
    mRuntime = nullptr;
    auto* builder = capability<nvinfer1::IPluginV3OneRuntime>(*mBuildPlugin, PluginCapabilityType::kRUNTIME);
    auto const* serialised = call("getFieldsToSerialize", [&] { return builder->getFieldsToSerialize(); });
    // A plan outlives the build-time plugin, so copy what the fields point to.
    std::vector<NamedField> stored;
    for (int32_t i = 0; i < serialised->nbFields; ++i) {
        stored.push_back(copyField(serialised->fields[i]));
    }
    auto const values = pluginFields(stored);
    mEnginePlugin = create({static_cast<int32_t>(values.size()), values.data()}, TensorRTPhase::kRUNTIME);
    auto* engine = capability<nvinfer1::IPluginV3OneRuntime>(*mEnginePlugin, PluginCapabilityType::kRUNTIME);
    mContextPlugin = Plugin(call("attachToContext", [&] { return engine->attachToContext(nullptr); }));
    mRuntime = capability<nvinfer1::IPluginV3OneRuntime>(*mContextPlugin, PluginCapabilityType::kRUNTIME);
}

void PluginNode::changeShapes(std::vector<nvinfer1::PluginTensorDesc> const& bindings, int inputs) {
    auto const outputs = static_cast<int32_t>(bindings.size()) - inputs;
    call("onShapeChange",
         [&] { return mRuntime->onShapeChange(bindings.data(), inputs, bindings.data() + inputs, outputs); });
}

void PluginNode::enqueue(std::vector<nvinfer1::PluginTensorDesc> const& bindings, int inputs,
                         void const* const* inputPointers, void* const* outputPointers, void* workspace,
                         cudaStream_t stream) {
    call("enqueue", [&] {
        return mRuntime->enqueue(bindings.data(), bindings.data() + inputs, inputPointers, outputPointers, workspace,
                                 stream);
    });
}

} // namespace flint::host
