#include "host/cuda_graphs.h"

#include "host/errors.h"

namespace flint::host {

size_t CudaGraphs::Hash::operator()(RunKey const& key) const noexcept {
    uint64_t hash = key.size();
    for (int64_t const value : key) {
        hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

CudaGraphs::~CudaGraphs() {
    clear();
}

void CudaGraphs::clear() {
    mIndex.clear();
    for (Entry& entry : mEntries) {
        if (entry.executable) {
            cudaGraphExecDestroy(entry.executable);
        }
    }
    mEntries.clear();
}

CudaGraphs::Entry* CudaGraphs::find(RunKey const& key, cudaStream_t stream) {
    if (auto const found = mIndex.find(key); found != mIndex.end()) {
        mEntries.splice(mEntries.begin(), mEntries, found->second);
        return &mEntries.front();
    }
    if (mEntries.size() >= mCapacity) {
        if (cudaGraphExec_t const oldest = mEntries.back().executable) {
            checkCuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); // It may still run.
            cudaGraphExecDestroy(oldest);
        }
        mIndex.erase(mEntries.back().key);
        mEntries.pop_back();
    }
    mEntries.push_front({key, nullptr});
    mIndex.emplace(key, mEntries.begin());
    return nullptr;
}

cudaGraphExec_t CudaGraphs::capture(cudaStream_t stream, std::function<void()> const& launch) {
    // Relaxed: launchers may set kernel attributes and load modules meanwhile, and the stream is the caller's alone.
    checkCuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
        launch();
    } catch (...) {
        cudaStreamEndCapture(stream, &graph);
        if (graph) {
            cudaGraphDestroy(graph);
        }
        cudaGetLastError(); // The launch's error is what is reported.
        throw;
    }
    checkCuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    cudaError_t const status = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    checkCuda(status, "cudaGraphInstantiate");
    return executable;
}

} // namespace flint::host
