// The C ABI of the plugin host, which runs a graph of our plugins without TensorRT: it drives the same IPluginV3
// objects through the same calls in the same order. Python's side of it is flint_runtime/executors/host_library.py.
//
// Life of a graph: create, add inputs and nodes in the order in which they run, mark outputs, prepare, then run any
// number of times. Nothing but flintHostRun needs a GPU. A function that fails returns -1 (nullptr where it returns a
// pointer), and flintHostLastError says why. One graph is for one thread at a time; graphs are independent.
//
// Memory: the caller owns inputs, outputs and the arena. Activations and each node's workspace share the arena by
// liveness. That is safe under programmatic dependent launch as long as every kernel waits for its predecessor before
// it touches memory (kernels/launch.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

extern "C" {

struct FlintHostGraph;

/// A plugin field; `type`: 0 integer, 1 real, 2 text, and the member of that name counts.
struct FlintHostField {
    char const* name;
    int32_t type;
    int32_t integer;
    float real;
    char const* text;
};

/// Where a tensor lies.
struct FlintHostPlacement {
    int32_t storage; ///< 0: a graph input's memory, 1: a graph output's, 2: the arena
    int32_t binding; ///< index of that input or output
    int32_t root;    ///< the tensor whose memory it shares, itself where it does not
    int32_t first;   ///< first and last node that needs it
    int32_t last;
    int64_t offset; ///< in the arena
    int64_t bytes;  ///< at the largest shapes
};

/// Of this thread's last failed call; valid until its next.
char const* flintHostLastError();

FlintHostGraph* flintHostCreate();
void flintHostDestroy(FlintHostGraph* graph);

/// `dtype`: an nvinfer1::DataType. `dims`: -1 where the size varies. Returns the tensor's index.
int32_t flintHostAddInput(FlintHostGraph* graph, char const* name, int32_t dtype, int32_t rank, int64_t const* dims);
/// Create a plugin and ask it for its outputs, whose indices go to `outputs`. Returns the node's index.
int32_t flintHostAddNode(FlintHostGraph* graph, char const* op, char const* layer, FlintHostField const* fields,
                         int32_t fieldCount, int32_t const* inputs, int32_t inputCount, char const* const* outputNames,
                         int32_t outputCount, int32_t* outputs);
/// `inArena`: the tensor stays in the arena until the next run, and takes no address of the caller's.
int32_t flintHostMarkOutput(FlintHostGraph* graph, int32_t tensor, int32_t inArena);

/// Configure the plugins for a range of shapes (of all inputs, dimension by dimension), plan the arena for the largest
/// and make the run-time plugins.
int32_t flintHostPrepare(FlintHostGraph* graph, int64_t const* least, int64_t const* usual, int64_t const* most,
                         int32_t count);
int64_t flintHostArenaBytes(FlintHostGraph* graph);
/// Of the node that asks for most; part of the arena.
int64_t flintHostWorkspaceBytes(FlintHostGraph* graph);
int32_t flintHostTensorPlacement(FlintHostGraph* graph, int32_t tensor, FlintHostPlacement* placement);
int32_t flintHostWorkspacePlacement(FlintHostGraph* graph, int32_t node, FlintHostPlacement* placement);

/// Infer all shapes and tell the plugins. flintHostRun does it, too.
int32_t flintHostSetShapes(FlintHostGraph* graph, int64_t const* dims, int32_t count);
/// Type and, for the shapes set last, dimensions (room for 8). Returns the rank.
int32_t flintHostTensorShape(FlintHostGraph* graph, int32_t tensor, int32_t* dtype, int64_t* dims);

/// Put one run on a stream. `addresses`: of all inputs, then of all outputs; 0 for an output that lies in the arena or
/// shares an input's memory. With `useCudaGraph`, shapes and addresses seen before are captured, then replayed. Returns
/// 0: launched, 1: captured and launched, 2: replayed.
int32_t flintHostRun(FlintHostGraph* graph, int64_t const* dims, int32_t dimCount, int64_t const* addresses,
                     int32_t addressCount, int64_t arena, cudaStream_t stream, int32_t useCudaGraph);
/// For tests: fill each node's outputs and workspace with 0xFF before it runs, without CUDA graphs.
int32_t flintHostSetPoison(FlintHostGraph* graph, int32_t poison);
/// The functions of a node's plugin in the order of their first calls, separated by spaces; valid until the next call.
char const* flintHostLifeCycle(FlintHostGraph* graph, int32_t node);

/// The planner alone: offsets of blocks alive from node first[i] to last[i]. Returns the arena's bytes.
int64_t flintHostPlanMemory(int32_t count, int64_t const* bytes, int32_t const* first, int32_t const* last,
                            int64_t* offsets);

} // extern "C"
