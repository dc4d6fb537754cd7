// One plugin, driven through its whole life as TensorRT drives it: build-time object, serialised fields, run-time
// object.
#pragma once

#include "trt/schema.h"

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

namespace flint::host {

/// A field as a graph file holds it.
struct NamedField {
    std::string name;
    FieldValue value;
};

/// Throws HostError with the plugin's own message where a call fails.
class PluginNode {
  public:
    /// createPlugin(kBUILD), and the clone that a network keeps.
    PluginNode(std::string const& op, std::string layer, std::vector<NamedField> const& fields);

    // --- Build ---
    int outputCount();
    std::vector<nvinfer1::DataType> outputTypes(std::vector<nvinfer1::DataType> const& inputs, int outputs);
    std::vector<nvinfer1::DimsExprs> outputShapes(std::vector<nvinfer1::DimsExprs> const& inputs, int outputs,
                                                  nvinfer1::IExprBuilder& builder);
    /// Per output the input whose memory it shares, or -1.
    std::vector<int> aliases(int inputs, int outputs);
    /// supportsFormatCombination for every binding, configurePlugin, getWorkspaceSize (returned).
    size_t configure(std::vector<nvinfer1::DynamicPluginTensorDesc> const& bindings, int inputs);

    // --- Run time ---
    /// getFieldsToSerialize, createPlugin(kRUNTIME) from what was serialised, attachToContext.
    void makeRuntime();
    /// onShapeChange.
    void changeShapes(std::vector<nvinfer1::PluginTensorDesc> const& bindings, int inputs);
    void enqueue(std::vector<nvinfer1::PluginTensorDesc> const& bindings, int inputs, void const* const* inputPointers,
                 void* const* outputPointers, void* workspace, cudaStream_t stream);

    std::string const& layer() const { return mLayer; }
    /// "node layers.3.mlp (NormMoe)".
    std::string const& who() const { return mWho; }
    /// The plugin's functions in the order in which each was first called.
    std::vector<char const*> const& lifeCycle() const { return mLifeCycle; }

  private:
    using Plugin = std::unique_ptr<nvinfer1::IPluginV3>;

    template <typename Body>
    auto call(char const* function, Body&& body);
    Plugin create(nvinfer1::PluginFieldCollection const& fields, nvinfer1::TensorRTPhase phase);
    template <typename T>
    T* capability(nvinfer1::IPluginV3& plugin, nvinfer1::PluginCapabilityType type);
    [[noreturn]] void fail(std::string const& problem, std::string const& logged) const;

    std::string mLayer;
    std::string mWho;
    std::vector<char const*> mLifeCycle; // Literals, compared by address: this is on the path of every launch.
    nvinfer1::IPluginCreatorV3One* mCreator = nullptr;
    Plugin mBuildPlugin;
    nvinfer1::IPluginV3OneBuild* mBuild = nullptr;
    /// The same object where the plugin knows aliases.
    nvinfer1::IPluginV3OneBuildV2* mBuildV2 = nullptr;
    /// What an engine deserialises once, and the copy that its execution context runs.
    Plugin mEnginePlugin;
    Plugin mContextPlugin;
    nvinfer1::IPluginV3OneRuntime* mRuntime = nullptr;
};

} // namespace flint::host
