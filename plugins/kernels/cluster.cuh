// Thread block clusters: blocks that run together and reach each other's shared memory.
#pragma once

#include "kernels/device.cuh"

namespace flint {

/// Number of this block in its cluster.
__device__ __forceinline__ int clusterRank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

/// Say that this thread has come here, without ordering memory; all threads of the cluster must.
__device__ __forceinline__ void arriveCluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/// The same, ordering what the thread wrote before for those that wait.
__device__ __forceinline__ void releaseCluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/// Wait until they have.
__device__ __forceinline__ void waitCluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// The address of a shared variable's counterpart in block `rank` of the cluster.
__device__ __forceinline__ uint32_t peerAddress(void const* shared, int rank) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(sharedAddress(shared)), "r"(rank));
    return address;
}

/// Store to a peer's shared memory; releaseCluster() and waitCluster() order it.
__device__ __forceinline__ void send(uint32_t peer, int value) {
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(peer), "r"(value) : "memory");
}

/// Store to a peer's shared memory. The bytes count for its CopyBarrier, which orders them: nobody needs a fence.
__device__ __forceinline__ void sendAsync(uint32_t peer, float4 value, uint32_t peerBarrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(peer),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(peerBarrier)
        : "memory");
}

__device__ __forceinline__ void sendAsync(uint32_t peer, float2 value, uint32_t peerBarrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(peer),
                 "f"(value.x), "f"(value.y), "r"(peerBarrier)
                 : "memory");
}

} // namespace flint
