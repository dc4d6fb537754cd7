#include "host/graph.h"

#include "host/errors.h"
#include "host/memory_plan.h"

#include <algorithm>
#include <utility>

namespace flint::host {

namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;

Dims toDims(Shape const& shape) {
    Dims dims{};
    dims.nbDims = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), dims.d);
    return dims;
}

} // namespace

int64_t elementBytes(DataType type) {
    switch (type) {
    case DataType::kFLOAT:
    case DataType::kINT32:
        return 4;
    case DataType::kBF16:
        return 2;
    case DataType::kINT8:
        return 1;
    default:
        throw HostError("tensors of DataType " + std::to_string(static_cast<int>(type)) + " are not supported");
    }
}

int Graph::checkTensor(int tensor) const {
    if (tensor < 0 || tensor >= static_cast<int>(mTensors.size())) {
        throw HostError("there is no tensor " + std::to_string(tensor));
    }
    return tensor;
}

int Graph::addTensor(Tensor tensor) {
    int const index = static_cast<int>(mTensors.size());
    if (tensor.root < 0) {
        tensor.root = index;
    }
    if (tensor.name.empty() || !mByName.try_emplace(tensor.name, index).second) {
        throw HostError("a second tensor, or one without a name: '" + tensor.name + "'");
    }
    mTensors.push_back(std::move(tensor));
    mPrepared = false;
    return index;
}

int Graph::addInput(std::string name, DataType type, Shape dims) {
    elementBytes(type);
    if (dims.size() > Dims::MAX_DIMS) {
        throw HostError("input " + name + " has " + std::to_string(dims.size()) + " dimensions");
    }
    Tensor tensor;
    tensor.dims.nbDims = static_cast<int32_t>(dims.size());
    for (size_t axis = 0; axis < dims.size(); ++axis) {
        if (dims[axis] < kDYNAMIC) {
            throw HostError("input " + name + ": dimension " + std::to_string(axis) + " is " +
                            std::to_string(dims[axis]));
        }
        tensor.dims.d[axis] = dims[axis] == kDYNAMIC ? mExpressions.unknown() : mExpressions.constant(dims[axis]);
    }
    tensor.name = std::move(name);
    tensor.type = type;
    tensor.declared = std::move(dims);
    int const index = addTensor(std::move(tensor));
    mInputs.push_back(index);
    return index;
}

/// What a node wrote in place must be read under its new name: the old one would hide the order.
void Graph::checkOrder(PluginNode const& plugin, std::vector<int> const& inputs) const {
    for (int const input : inputs) {
        auto const latest = mLatest.find(mTensors[input].root);
        if (latest != mLatest.end() && latest->second.first != input) {
            throw HostError(plugin.who() + " reads " + mTensors[input].name + ", which " +
                            mNodes[latest->second.second].plugin.who() + " has overwritten as " +
                            mTensors[latest->second.first].name);
        }
    }
}

int Graph::addNode(std::string const& op, std::string layer, std::vector<NamedField> const& fields,
                   std::vector<int> inputs, std::vector<std::string> const& outputNames) {
    PluginNode plugin(op, std::move(layer), fields);
    int const outputs = plugin.outputCount();
    if (static_cast<int>(outputNames.size()) != outputs) {
        throw HostError(plugin.who() + " has " + std::to_string(outputs) + " outputs, names were given for " +
                        std::to_string(outputNames.size()));
    }
    for (std::string const& name : outputNames) {
        if (mByName.contains(name)) { // Before anything is added.
            throw HostError(plugin.who() + ": there is a tensor '" + name + "' already");
        }
    }
    std::vector<DataType> types;
    std::vector<nvinfer1::DimsExprs> dims;
    for (int const input : inputs) {
        types.push_back(mTensors[checkTensor(input)].type);
        dims.push_back(mTensors[input].dims);
    }
    checkOrder(plugin, inputs);
    auto const outputTypes = plugin.outputTypes(types, outputs);
    auto const outputDims = plugin.outputShapes(dims, outputs, mExpressions.builder());
    auto const aliases = plugin.aliases(static_cast<int>(inputs.size()), outputs);
    std::vector<int> tensors;
    for (int i = 0; i < outputs; ++i) {
        Tensor tensor;
        tensor.name = outputNames[i];
        tensor.type = outputTypes[i];
        tensor.dims = outputDims[i];
        elementBytes(tensor.type);
        if (aliases[i] >= 0) {
            Tensor const& source = mTensors[inputs[aliases[i]]];
            if (source.type != tensor.type || source.dims.nbDims != tensor.dims.nbDims) {
                throw HostError(plugin.who() + ": output " + tensor.name + " shares the memory of " + source.name +
                                ", which has another type or rank");
            }
            tensor.root = source.root;
        }
        tensors.push_back(addTensor(std::move(tensor)));
        if (aliases[i] >= 0) {
            mLatest[mTensors[tensors.back()].root] = {tensors.back(), static_cast<int>(mNodes.size())};
        }
    }
    mNodes.push_back({std::move(plugin), std::move(inputs), std::move(tensors), {}});
    return static_cast<int>(mNodes.size()) - 1;
}

void Graph::markOutput(int tensor, bool inArena) {
    Tensor const& marked = mTensors[checkTensor(tensor)];
    if (std::find(mInputs.begin(), mInputs.end(), tensor) != mInputs.end()) {
        throw HostError("the graph input " + marked.name + " cannot be a graph output, too");
    }
    for (GraphOutput const& output : mOutputs) {
        if (output.tensor == tensor) {
            throw HostError(marked.name + " is a graph output already");
        }
    }
    mOutputs.push_back({tensor, inArena});
    mPrepared = false;
}

std::vector<int64_t> Graph::evaluateUnchecked(InputDims dims) const {
    std::vector<int64_t> unknowns;
    size_t at = 0;
    for (int const input : mInputs) {
        for (int64_t const declared : mTensors[input].declared) {
            if (at == dims.size()) {
                throw HostError("fewer dimensions than the graph's inputs have: " + std::to_string(at));
            }
            int64_t const size = dims[at++];
            if (declared == kDYNAMIC ? size < 0 : size != declared) {
                throw HostError("input " + mTensors[input].name + ": a dimension must be " +
                                (declared == kDYNAMIC ? "at least 0" : std::to_string(declared)) + ", found " +
                                std::to_string(size));
            }
            if (declared == kDYNAMIC) {
                unknowns.push_back(size);
            }
        }
    }
    if (at != dims.size()) {
        throw HostError("the graph's inputs have " + std::to_string(at) + " dimensions in all, found " +
                        std::to_string(dims.size()));
    }
    return mExpressions.evaluate(unknowns);
}

std::vector<int64_t> Graph::evaluate(InputDims dims) const {
    auto values = evaluateUnchecked(dims);
    size_t at = 0;
    for (int const input : mInputs) {
        for (size_t axis = 0; axis < mTensors[input].declared.size(); ++axis, ++at) {
            if (dims[at] < mLeast[at] || dims[at] > mMost[at]) {
                throw HostError("input " + mTensors[input].name + ": dimension " + std::to_string(axis) +
                                " must be from " + std::to_string(mLeast[at]) + " to " + std::to_string(mMost[at]) +
                                ", found " + std::to_string(dims[at]));
            }
        }
    }
    return values;
}

Shape Graph::shape(int tensor, std::vector<int64_t> const& values) const {
    auto const& dims = mTensors[checkTensor(tensor)].dims;
    Shape shape;
    for (int32_t axis = 0; axis < dims.nbDims; ++axis) {
        shape.push_back(Expressions::valueOf(dims.d[axis], values));
    }
    return shape;
}

int64_t Graph::bytes(int tensor, std::vector<int64_t> const& values) const {
    int64_t total = elementBytes(mTensors[tensor].type);
    for (int64_t const size : shape(tensor, values)) {
        if (__builtin_mul_overflow(total, size, &total)) {
            throw HostError(mTensors[tensor].name + " is larger than any memory");
        }
    }
    return total;
}

void Graph::configure(GraphNode& node, std::vector<int64_t> const (&corners)[3]) {
    std::vector<DynamicPluginTensorDesc> bindings;
    auto const add = [&](int tensor) {
        auto const& dims = mTensors[tensor].dims;
        DynamicPluginTensorDesc binding{};
        binding.desc.type = mTensors[tensor].type;
        binding.desc.format = nvinfer1::TensorFormat::kLINEAR;
        binding.desc.dims.nbDims = dims.nbDims;
        for (int32_t axis = 0; axis < dims.nbDims; ++axis) {
            binding.desc.dims.d[axis] = dims.d[axis]->isConstant() ? dims.d[axis]->getConstantValue() : kDYNAMIC;
        }
        binding.min = toDims(shape(tensor, corners[0]));
        binding.opt = toDims(shape(tensor, corners[1]));
        binding.max = toDims(shape(tensor, corners[2]));
        bindings.push_back(binding);
    };
    std::for_each(node.inputs.begin(), node.inputs.end(), add);
    std::for_each(node.outputs.begin(), node.outputs.end(), add);
    node.workspace.bytes = static_cast<int64_t>(node.plugin.configure(bindings, static_cast<int>(node.inputs.size())));
}

void Graph::place(std::vector<int64_t> const& most) {
    int const end = static_cast<int>(mNodes.size());
    mPlacements.assign(mTensors.size(), {});
    for (size_t i = 0; i < mInputs.size(); ++i) {
        mPlacements[mInputs[i]] = {Storage::kINPUT, static_cast<int>(i), 0, bytes(mInputs[i], most), 0, end};
    }
    std::vector<bool> touched(mTensors.size(), false);
    for (int node = 0; node < end; ++node) {
        auto const touch = [&](int tensor) {
            int const root = mTensors[tensor].root;
            if (mPlacements[root].storage == Storage::kARENA) {
                if (!touched[root]) {
                    mPlacements[root].first = node;
                    mPlacements[root].bytes = bytes(root, most);
                }
                mPlacements[root].last = node;
                touched[root] = true;
            }
        };
        std::for_each(mNodes[node].inputs.begin(), mNodes[node].inputs.end(), touch);
        std::for_each(mNodes[node].outputs.begin(), mNodes[node].outputs.end(), touch);
    }
    for (size_t i = 0; i < mOutputs.size(); ++i) {
        Placement& placement = mPlacements[mTensors[mOutputs[i].tensor].root];
        if (placement.storage == Storage::kINPUT) {
            continue; // In place.
        }
        placement.last = end;
        if (mOutputs[i].inArena) {
            continue;
        }
        if (placement.storage == Storage::kOUTPUT) {
            throw HostError("the graph outputs " + mTensors[mOutputs[placement.binding].tensor].name + " and " +
                            mTensors[mOutputs[i].tensor].name + " share their memory");
        }
        placement.storage = Storage::kOUTPUT;
        placement.binding = static_cast<int>(i);
    }
    std::vector<Lifetime> blocks;
    std::vector<Placement*> owners;
    for (size_t tensor = 0; tensor < mTensors.size(); ++tensor) {
        Placement& placement = mPlacements[tensor];
        if (touched[tensor] && placement.storage == Storage::kARENA) {
            owners.push_back(&placement);
        }
    }
    mLargestWorkspace = 0;
    for (int node = 0; node < end; ++node) {
        Placement& workspace = mNodes[node].workspace;
        workspace.first = workspace.last = node;
        owners.push_back(&workspace);
        mLargestWorkspace = std::max(mLargestWorkspace, workspace.bytes);
    }
    for (Placement const* owner : owners) {
        blocks.push_back({owner->bytes, owner->first, owner->last});
    }
    MemoryPlan const plan = planMemory(blocks);
    for (size_t i = 0; i < owners.size(); ++i) {
        owners[i]->offset = plan.offsets[i];
    }
    mArenaBytes = plan.bytes;
}

void Graph::prepare(InputDims least, InputDims usual, InputDims most) {
    mPrepared = false;
    if (mNodes.empty()) {
        throw HostError("the graph has no nodes");
    }
    for (size_t i = 0; i < most.size() && i < least.size(); ++i) {
        if (least[i] > most[i]) {
            throw HostError("the range of shapes is empty: from " + std::to_string(least[i]) + " to " +
                            std::to_string(most[i]));
        }
    }
    std::vector<int64_t> const corners[3] = {evaluateUnchecked(least), evaluateUnchecked(usual),
                                             evaluateUnchecked(most)};
    mLeast.assign(least.begin(), least.end());
    mMost.assign(most.begin(), most.end());
    for (GraphNode& node : mNodes) {
        configure(node, corners);
    }
    place(corners[2]);
    for (GraphNode& node : mNodes) {
        node.plugin.makeRuntime();
    }
    mPrepared = true;
}

} // namespace flint::host
