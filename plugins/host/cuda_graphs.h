// CUDA graphs by what they were captured from: shapes and addresses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <list>
#include <unordered_map>
#include <vector>

namespace flint::host {

/// Everything that a captured launch depends on.
using RunKey = std::vector<int64_t>;

/// Owns the executable graphs; the least recently used go first. Not thread-safe.
class CudaGraphs {
  public:
    explicit CudaGraphs(size_t capacity) : mCapacity(capacity) {}
    ~CudaGraphs();
    CudaGraphs(CudaGraphs const&) = delete;
    CudaGraphs& operator=(CudaGraphs const&) = delete;

    struct Entry {
        RunKey key;
        /// nullptr until captured.
        cudaGraphExec_t executable = nullptr;
    };

    /// The entry of a key, or nullptr where the key is new. A new key is remembered: the next time it has an entry.
    Entry* find(RunKey const& key, cudaStream_t stream);
    void clear();
    size_t size() const { return mEntries.size(); }

    /// Record what `launch` puts on the stream. Whatever goes wrong, the stream is left outside of capture. Throws
    /// HostError, and whatever `launch` throws.
    static cudaGraphExec_t capture(cudaStream_t stream, std::function<void()> const& launch);

  private:
    struct Hash {
        size_t operator()(RunKey const& key) const noexcept;
    };

    size_t mCapacity;
    std::list<Entry> mEntries; // Most recently used first.
    std::unordered_map<RunKey, std::list<Entry>::iterator, Hash> mIndex;
};

} // namespace flint::host
