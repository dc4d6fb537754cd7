#include "host/host.h"

#include "host/errors.h"
#include "host/graph.h"
#include "host/memory_plan.h"
#include "host/runner.h"

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#define FLINT_EXPORT extern "C" __attribute__((visibility("default")))

struct FlintHostGraph {
    flint::host::Graph graph;
    flint::host::Runner runner{graph};
    std::string text;
};

namespace {

using namespace flint::host;

thread_local std::string tLastError;

/// Run `body`; an exception becomes the last error and `failure`.
template <typename T, typename Body>
T guarded(T failure, Body&& body) noexcept {
    try {
        return body();
    } catch (std::exception const& error) {
        tLastError = error.what();
    } catch (...) {
        tLastError = "unknown exception";
    }
    return failure;
}

template <typename T>
T& require(T* pointer, char const* what) {
    if (!pointer) {
        throw HostError(std::string(what) + " is a null pointer");
    }
    return *pointer;
}

template <typename T>
std::span<T const> list(T const* data, int32_t count, char const* what) {
    if (count < 0 || (count > 0 && !data)) {
        throw HostError(std::string(what) + ": " + std::to_string(count) +
                        " elements at a null pointer or fewer than 0");
    }
    return {data, static_cast<size_t>(count)};
}

NamedField namedField(FlintHostField const& field) {
    std::string name = &require(field.name, "a field's name");
    switch (field.type) {
    case 0:
        return {std::move(name), field.integer};
    case 1:
        return {std::move(name), field.real};
    case 2:
        return {std::move(name), std::string(&require(field.text, "a field's text"))};
    default:
        throw HostError("field " + name + " has the unknown type " + std::to_string(field.type));
    }
}

void checkNode(FlintHostGraph& graph, int32_t node) {
    if (node < 0 || node >= static_cast<int32_t>(graph.graph.nodes().size())) {
        throw HostError("there is no node " + std::to_string(node));
    }
}

void copyPlacement(Placement const& from, int root, FlintHostPlacement& to) {
    to = {static_cast<int32_t>(from.storage), from.binding, root, from.first, from.last, from.offset, from.bytes};
}

Graph& prepared(FlintHostGraph* graph) {
    Graph& found = require(graph, "graph").graph;
    if (!found.prepared()) {
        throw HostError("the graph is not prepared");
    }
    return found;
}

} // namespace

FLINT_EXPORT char const* flintHostLastError() {
    return tLastError.c_str();
}

FLINT_EXPORT FlintHostGraph* flintHostCreate() {
    return guarded<FlintHostGraph*>(nullptr, [] { return new FlintHostGraph; });
}

FLINT_EXPORT void flintHostDestroy(FlintHostGraph* graph) {
    delete graph;
}

FLINT_EXPORT int32_t flintHostAddInput(FlintHostGraph* graph, char const* name, int32_t dtype, int32_t rank,
                                       int64_t const* dims) {
    return guarded<int32_t>(-1, [&] {
        auto const sizes = list(dims, rank, "dims");
        return require(graph, "graph")
            .graph.addInput(&require(name, "name"), static_cast<nvinfer1::DataType>(dtype),
                            Shape(sizes.begin(), sizes.end()));
    });
}

FLINT_EXPORT int32_t flintHostAddNode(FlintHostGraph* graph, char const* op, char const* layer,
                                      FlintHostField const* fields, int32_t fieldCount, int32_t const* inputs,
                                      int32_t inputCount, char const* const* outputNames, int32_t outputCount,
                                      int32_t* outputs) {
    return guarded<int32_t>(-1, [&] {
        Graph& target = require(graph, "graph").graph;
        std::vector<NamedField> named;
        for (FlintHostField const& field : list(fields, fieldCount, "fields")) {
            named.push_back(namedField(field));
        }
        std::vector<std::string> names;
        for (char const* name : list(outputNames, outputCount, "outputNames")) {
            names.emplace_back(&require(name, "an output's name"));
        }
        auto const sources = list(inputs, inputCount, "inputs");
        require(outputs, "outputs");
        int const node = target.addNode(&require(op, "op"), &require(layer, "layer"), named,
                                        std::vector<int>(sources.begin(), sources.end()), names);
        std::copy(target.nodes()[node].outputs.begin(), target.nodes()[node].outputs.end(), outputs);
        return node;
    });
}

FLINT_EXPORT int32_t flintHostMarkOutput(FlintHostGraph* graph, int32_t tensor, int32_t inArena) {
    return guarded<int32_t>(-1, [&] {
        require(graph, "graph").graph.markOutput(tensor, inArena != 0);
        return 0;
    });
}

FLINT_EXPORT int32_t flintHostPrepare(FlintHostGraph* graph, int64_t const* least, int64_t const* usual,
                                      int64_t const* most, int32_t count) {
    return guarded<int32_t>(-1, [&] {
        FlintHostGraph& target = require(graph, "graph");
        target.runner.reset();
        target.graph.prepare(list(least, count, "least"), list(usual, count, "usual"), list(most, count, "most"));
        return 0;
    });
}

FLINT_EXPORT int64_t flintHostArenaBytes(FlintHostGraph* graph) {
    return guarded<int64_t>(-1, [&] { return prepared(graph).arenaBytes(); });
}

FLINT_EXPORT int64_t flintHostWorkspaceBytes(FlintHostGraph* graph) {
    return guarded<int64_t>(-1, [&] { return prepared(graph).largestWorkspace(); });
}

FLINT_EXPORT int32_t flintHostTensorPlacement(FlintHostGraph* graph, int32_t tensor, FlintHostPlacement* placement) {
    return guarded<int32_t>(-1, [&] {
        Graph& found = prepared(graph);
        if (tensor < 0 || tensor >= static_cast<int32_t>(found.tensors().size())) {
            throw HostError("there is no tensor " + std::to_string(tensor));
        }
        copyPlacement(found.placement(tensor), found.tensors()[tensor].root, require(placement, "placement"));
        return 0;
    });
}

FLINT_EXPORT int32_t flintHostWorkspacePlacement(FlintHostGraph* graph, int32_t node, FlintHostPlacement* placement) {
    return guarded<int32_t>(-1, [&] {
        Graph& found = prepared(graph);
        checkNode(*graph, node);
        copyPlacement(found.nodes()[node].workspace, -1, require(placement, "placement"));
        return 0;
    });
}

FLINT_EXPORT int32_t flintHostSetShapes(FlintHostGraph* graph, int64_t const* dims, int32_t count) {
    return guarded<int32_t>(-1, [&] {
        require(graph, "graph").runner.setShapes(list(dims, count, "dims"));
        return 0;
    });
}

FLINT_EXPORT int32_t flintHostTensorShape(FlintHostGraph* graph, int32_t tensor, int32_t* dtype, int64_t* dims) {
    return guarded<int32_t>(-1, [&] {
        Shape const shape = require(graph, "graph").runner.shape(tensor);
        require(dtype, "dtype") = static_cast<int32_t>(graph->graph.tensors()[tensor].type);
        std::copy(shape.begin(), shape.end(), &require(dims, "dims"));
        return static_cast<int32_t>(shape.size());
    });
}

FLINT_EXPORT int32_t flintHostRun(FlintHostGraph* graph, int64_t const* dims, int32_t dimCount,
                                  int64_t const* addresses, int32_t addressCount, int64_t arena, cudaStream_t stream,
                                  int32_t useCudaGraph) {
    return guarded<int32_t>(-1, [&] {
        return static_cast<int32_t>(require(graph, "graph")
                                        .runner.run(list(dims, dimCount, "dims"),
                                                    list(addresses, addressCount, "addresses"), arena, stream,
                                                    useCudaGraph != 0));
    });
}

FLINT_EXPORT int32_t flintHostSetPoison(FlintHostGraph* graph, int32_t poison) {
    return guarded<int32_t>(-1, [&] {
        require(graph, "graph").runner.setPoison(poison != 0);
        return 0;
    });
}

FLINT_EXPORT char const* flintHostLifeCycle(FlintHostGraph* graph, int32_t node) {
    return guarded<char const*>(nullptr, [&] {
        checkNode(require(graph, "graph"), node);
        graph->text.clear();
        for (char const* function : graph->graph.nodes()[node].plugin.lifeCycle()) {
            graph->text += (graph->text.empty() ? "" : " ") + std::string(function);
        }
        return graph->text.c_str();
    });
}

FLINT_EXPORT int64_t flintHostPlanMemory(int32_t count, int64_t const* bytes, int32_t const* first, int32_t const* last,
                                         int64_t* offsets) {
    return guarded<int64_t>(-1, [&] {
        list(bytes, count, "bytes");
        list(first, count, "first");
        list(last, count, "last");
        list(offsets, count, "offsets");
        std::vector<Lifetime> blocks;
        for (int32_t i = 0; i < count; ++i) {
            blocks.push_back({bytes[i], first[i], last[i]});
        }
        MemoryPlan const plan = planMemory(blocks);
        std::copy(plan.offsets.begin(), plan.offsets.end(), offsets);
        return plan.bytes;
    });
}
