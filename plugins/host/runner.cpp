#include "host/runner.h"

#include "host/errors.h"
#include "host/memory_plan.h"

#include <algorithm>

namespace flint::host {

namespace {

using nvinfer1::PluginTensorDesc;

bool sameShapes(std::vector<PluginTensorDesc> const& a, std::vector<PluginTensorDesc> const& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](PluginTensorDesc const& x, PluginTensorDesc const& y) {
        return x.dims.nbDims == y.dims.nbDims && std::equal(x.dims.d, x.dims.d + x.dims.nbDims, y.dims.d);
    });
}

} // namespace

void Runner::reset() {
    mDims.reset();
    mBindings.clear();
    mCudaGraphs.clear();
}

void Runner::setShapes(InputDims dims) {
    if (!mGraph.prepared()) {
        throw HostError("the graph is not prepared");
    }
    if (mDims && std::equal(dims.begin(), dims.end(), mDims->begin(), mDims->end())) {
        return;
    }
    auto values = mGraph.evaluate(dims);
    mDims.reset();
    mValues = std::move(values);
    mBindings.resize(mGraph.nodes().size());
    for (size_t i = 0; i < mBindings.size(); ++i) {
        GraphNode& node = mGraph.nodes()[i];
        std::vector<PluginTensorDesc> bindings;
        auto const add = [&](int tensor) {
            Shape const shape = mGraph.shape(tensor, mValues);
            PluginTensorDesc binding{};
            binding.type = mGraph.tensors()[tensor].type;
            binding.format = nvinfer1::TensorFormat::kLINEAR;
            binding.dims.nbDims = static_cast<int32_t>(shape.size());
            std::copy(shape.begin(), shape.end(), binding.dims.d);
            bindings.push_back(binding);
            auto const& placement = mGraph.placement(tensor);
            if (placement.storage == Storage::kARENA && mGraph.bytes(tensor, mValues) > placement.bytes) {
                throw HostError(node.plugin.who() + ": " + mGraph.tensors()[tensor].name +
                                " is larger than at the largest shapes");
            }
        };
        std::for_each(node.inputs.begin(), node.inputs.end(), add);
        std::for_each(node.outputs.begin(), node.outputs.end(), add);
        if (sameShapes(bindings, mBindings[i])) {
            continue;
        }
        mBindings[i].clear(); // Until the plugin has accepted them.
        node.plugin.changeShapes(bindings, static_cast<int>(node.inputs.size()));
        mBindings[i] = std::move(bindings);
    }
    mDims.emplace(dims.begin(), dims.end());
}

Shape Runner::shape(int tensor) const {
    if (!mDims) {
        throw HostError("no shapes are set");
    }
    return mGraph.shape(tensor, mValues);
}

void Runner::checkAddresses(std::span<int64_t const> addresses, int64_t arena) const {
    auto const& inputs = mGraph.inputs();
    auto const& outputs = mGraph.outputs();
    if (addresses.size() != inputs.size() + outputs.size()) {
        throw HostError("expected " + std::to_string(inputs.size()) + " addresses of inputs and " +
                        std::to_string(outputs.size()) + " of outputs, found " + std::to_string(addresses.size()));
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (!addresses[i]) {
            throw HostError("input " + mGraph.tensors()[inputs[i]].name + " has no address");
        }
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
        auto const& placement = mGraph.placement(outputs[i].tensor);
        int64_t const found = addresses[inputs.size() + i];
        std::string const& name = mGraph.tensors()[outputs[i].tensor].name;
        if (placement.storage == Storage::kINPUT) {
            if (found && found != addresses[placement.binding]) {
                throw HostError("output " + name + " must have the address of " +
                                mGraph.tensors()[inputs[placement.binding]].name + ", whose memory it shares");
            }
        } else if (placement.storage == Storage::kOUTPUT && placement.binding == static_cast<int>(i) && !found) {
            throw HostError("output " + name + " has no address");
        } else if (placement.storage == Storage::kARENA && found) {
            throw HostError("output " + name + " lies in the arena and takes no address");
        }
    }
    if (mGraph.arenaBytes() > 0 && (!arena || arena % kARENA_ALIGNMENT)) {
        throw HostError("the arena must be " + std::to_string(mGraph.arenaBytes()) + " bytes, aligned to " +
                        std::to_string(kARENA_ALIGNMENT));
    }
}

void* Runner::address(int tensor) const {
    auto const& placement = mGraph.placement(tensor);
    int64_t at = mArena + placement.offset;
    if (placement.storage == Storage::kINPUT) {
        at = mAddresses[placement.binding];
    } else if (placement.storage == Storage::kOUTPUT) {
        at = mAddresses[mGraph.inputs().size() + placement.binding];
    }
    return reinterpret_cast<void*>(at);
}

void Runner::poison(GraphNode const& node, cudaStream_t stream) const {
    for (int const tensor : node.outputs) {
        if (mGraph.tensors()[tensor].root == tensor) {
            checkCuda(cudaMemsetAsync(address(tensor), 0xFF, mGraph.bytes(tensor, mValues), stream), "cudaMemsetAsync");
        }
    }
    if (node.workspace.bytes) {
        void* const workspace = reinterpret_cast<void*>(mArena + node.workspace.offset);
        checkCuda(cudaMemsetAsync(workspace, 0xFF, node.workspace.bytes, stream), "cudaMemsetAsync");
    }
}

void Runner::launch(cudaStream_t stream) {
    std::vector<void const*> inputs;
    std::vector<void*> outputs;
    for (size_t i = 0; i < mBindings.size(); ++i) {
        GraphNode& node = mGraph.nodes()[i];
        inputs.clear();
        outputs.clear();
        for (int const tensor : node.inputs) {
            inputs.push_back(address(tensor));
        }
        for (int const tensor : node.outputs) {
            outputs.push_back(address(tensor));
        }
        if (mPoison) {
            poison(node, stream);
        }
        void* const workspace =
            node.workspace.bytes ? reinterpret_cast<void*>(mArena + node.workspace.offset) : nullptr;
        node.plugin.enqueue(mBindings[i], static_cast<int>(node.inputs.size()), inputs.data(), outputs.data(),
                            workspace, stream);
    }
}

RunKind Runner::run(InputDims dims, std::span<int64_t const> addresses, int64_t arena, cudaStream_t stream,
                    bool useCudaGraph) {
    if (!mGraph.prepared()) {
        throw HostError("the graph is not prepared");
    }
    CudaGraphs::Entry* entry = nullptr;
    if (useCudaGraph && !mPoison) {
        if (!stream) {
            throw HostError("a CUDA graph needs a stream other than the default one");
        }
        RunKey key(dims.begin(), dims.end());
        key.insert(key.end(), addresses.begin(), addresses.end());
        key.push_back(arena);
        entry = mCudaGraphs.find(key, stream);
        if (entry && entry->executable) {
            checkCuda(cudaGraphLaunch(entry->executable, stream), "cudaGraphLaunch");
            return RunKind::kREPLAYED;
        }
    }
    setShapes(dims);
    checkAddresses(addresses, arena);
    mAddresses = addresses;
    mArena = arena;
    if (!entry) {
        launch(stream);
        return RunKind::kEAGER;
    }
    entry->executable = CudaGraphs::capture(stream, [&] { launch(stream); });
    checkCuda(cudaGraphLaunch(entry->executable, stream), "cudaGraphLaunch");
    return RunKind::kCAPTURED;
}

} // namespace flint::host
