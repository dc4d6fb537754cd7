// Runs a prepared graph: shapes, addresses, launches, CUDA graphs.
#pragma once

#include "host/cuda_graphs.h"
#include "host/graph.h"

#include <optional>
#include <span>
#include <vector>

namespace flint::host {

/// How a run reached the GPU.
enum class RunKind : int { kEAGER = 0, kCAPTURED = 1, kREPLAYED = 2 };

class Runner {
  public:
    explicit Runner(Graph& graph) : mGraph(graph), mCudaGraphs(kCUDA_GRAPHS) {}

    /// Forget shapes and CUDA graphs: the graph was prepared anew.
    void reset();
    /// Infer all shapes and tell them to the plugins, where they differ from the last. Needs no GPU.
    void setShapes(InputDims dims);
    /// Of a tensor, for the shapes set last.
    Shape shape(int tensor) const;

    /// Put one run of the graph on a stream.
    ///
    /// `addresses`: of the graph's inputs, then of its outputs. 0 for an output that lies in the arena or shares an
    /// input's memory. `arena`: arenaBytes of device memory, aligned to 256 bytes.
    /// `useCudaGraph`: a combination of shapes and addresses runs eagerly the first time (so that modules are loaded),
    /// is captured the second time and replayed from then on. Needs a stream other than the default one.
    RunKind run(InputDims dims, std::span<int64_t const> addresses, int64_t arena, cudaStream_t stream,
                bool useCudaGraph);

    /// For tests: fill each node's outputs and workspace with 0xFF (NaN) before it runs. Runs are eager then.
    void setPoison(bool poison) { mPoison = poison; }
    size_t cudaGraphs() const { return mCudaGraphs.size(); }

  private:
    static constexpr size_t kCUDA_GRAPHS = 128;

    void checkAddresses(std::span<int64_t const> addresses, int64_t arena) const;
    void* address(int tensor) const;
    void launch(cudaStream_t stream);
    void poison(GraphNode const& node, cudaStream_t stream) const;

    Graph& mGraph;
    CudaGraphs mCudaGraphs;
    bool mPoison = false;
    /// The shapes that the plugins know, and the values of all expressions for them.
    std::optional<Shape> mDims;
    std::vector<int64_t> mValues;
    /// Per node its bindings, as last told to the plugin; empty: not told.
    std::vector<std::vector<nvinfer1::PluginTensorDesc>> mBindings;
    /// Of the present run.
    std::span<int64_t const> mAddresses;
    int64_t mArena = 0;
};

} // namespace flint::host
