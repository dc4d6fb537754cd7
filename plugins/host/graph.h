// A graph of plugin nodes: its tensors, what each needs in memory, and the nodes' build phase.
#pragma once

#include "host/expressions.h"
#include "host/plugin_node.h"

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace flint::host {

using Shape = std::vector<int64_t>;

/// The size of a dimension that differs from step to step.
inline constexpr int64_t kDYNAMIC = -1;

struct Tensor {
    std::string name;
    nvinfer1::DataType type{};
    nvinfer1::DimsExprs dims{};
    /// The tensor whose memory it shares: itself, unless it is an aliased output.
    int root = -1;
    /// Of a graph input: sizes as declared, kDYNAMIC where they vary.
    Shape declared;
};

/// Who provides a root tensor's memory.
enum class Storage { kINPUT, kOUTPUT, kARENA };

struct Placement {
    Storage storage = Storage::kARENA;
    /// Index of the graph input or output that provides it.
    int binding = -1;
    /// In the arena, at the largest shapes.
    int64_t offset = 0;
    int64_t bytes = 0;
    /// First and last node that touches it; the number of nodes for what must outlive the last.
    int first = 0;
    int last = 0;
};

struct GraphNode {
    PluginNode plugin;
    std::vector<int> inputs;
    std::vector<int> outputs;
    /// Workspace in the arena, alive during this node only.
    Placement workspace;
};

struct GraphOutput {
    int tensor;
    /// Kept in the arena until the next run rather than written to an address of the caller's.
    bool inArena;
};

/// Sizes of the graph's dynamic dimensions for one corner of the profile, or for one run: the dimensions of all inputs,
/// static ones included, one behind another in the order of the inputs.
using InputDims = std::span<int64_t const>;

class Graph {
  public:
    /// Both return the tensor's or node's index and throw HostError.
    int addInput(std::string name, nvinfer1::DataType type, Shape dims);
    int addNode(std::string const& op, std::string layer, std::vector<NamedField> const& fields,
                std::vector<int> inputs, std::vector<std::string> const& outputNames);
    void markOutput(int tensor, bool inArena);

    /// Configure every node for a range of shapes, plan the arena for the largest and make the run-time plugins. May be
    /// called again, for another range.
    void prepare(InputDims least, InputDims usual, InputDims most);
    bool prepared() const { return mPrepared; }

    /// Values of all expressions. Throws HostError where sizes are not what was declared, or outside the range.
    std::vector<int64_t> evaluate(InputDims dims) const;
    Shape shape(int tensor, std::vector<int64_t> const& values) const;
    int64_t bytes(int tensor, std::vector<int64_t> const& values) const;

    std::vector<Tensor> const& tensors() const { return mTensors; }
    /// Of a root tensor.
    Placement const& placement(int tensor) const { return mPlacements[mTensors[tensor].root]; }
    std::vector<int> const& inputs() const { return mInputs; }
    std::vector<GraphOutput> const& outputs() const { return mOutputs; }
    std::vector<GraphNode>& nodes() { return mNodes; }
    int64_t arenaBytes() const { return mArenaBytes; }
    int64_t largestWorkspace() const { return mLargestWorkspace; }

  private:
    int addTensor(Tensor tensor);
    int checkTensor(int tensor) const;
    void checkOrder(PluginNode const& plugin, std::vector<int> const& inputs) const;
    void configure(GraphNode& node, std::vector<int64_t> const (&corners)[3]);
    void place(std::vector<int64_t> const& most);
    std::vector<int64_t> evaluateUnchecked(InputDims dims) const;

    Expressions mExpressions;
    std::vector<Tensor> mTensors;
    std::unordered_map<std::string, int> mByName;
    std::vector<int> mInputs;
    std::vector<GraphOutput> mOutputs;
    std::vector<GraphNode> mNodes;
    /// Per root tensor: the alias written last, and the node that wrote it.
    std::unordered_map<int, std::pair<int, int>> mLatest;
    std::vector<Placement> mPlacements;
    Shape mLeast, mMost;
    int64_t mArenaBytes = 0;
    int64_t mLargestWorkspace = 0;
    bool mPrepared = false;
};

/// Bytes of one element; throws HostError for a type that ops do not use.
int64_t elementBytes(nvinfer1::DataType type);

} // namespace flint::host
