// What decode and prefill attention share: the shape, shared-memory tiles, exponentials, rows of padding.
#pragma once

#include "kernels/attention.h"
#include "kernels/device.cuh"

namespace flint::attention {

constexpr int kHEAD_DIM = 128;
constexpr int kGROUP = 8; // Query heads that share a KV head.
constexpr int kPAGE_TOKENS = 64;
constexpr int kROW_BYTES = kHEAD_DIM * 2;
constexpr int kSEGMENT = 8;                         // BF16 values in 16 bytes.
constexpr int kROW_SEGMENTS = kHEAD_DIM / kSEGMENT; // Of a row of K, V or Q.
constexpr float kLOG2E = 1.4426950408889634f;
constexpr float kLOGIT_SCALE = 0.08838834764831845f * kLOG2E; // 128^-0.5, in the exponent of 2.
constexpr float kMINUS_INFINITY = -__builtin_huge_valf();
constexpr int kNO_WINDOW = 1 << 30;
constexpr int kLEAST_RING = 32;

/// The params in the kernels' own types.
struct Arguments {
    bf16 const* q;
    float const* sinks;
    int32_t const* query_start;
    int32_t const* seq_lens;
    int32_t const* page_table;
    int32_t const* ring_slot;
    bf16 const* kv_pool;
    bf16 const* fresh_kv;
    bf16* out;
    int tokens;
    int sequences;
    int table_width;
    int kv_heads;
    int ring;
    int window; // kNO_WINDOW in full layers.

    explicit Arguments(SinkAttentionParams const& p)
        : q(static_cast<bf16 const*>(p.q)), sinks(p.sinks), query_start(p.query_start), seq_lens(p.seq_lens),
          page_table(p.page_table), ring_slot(p.ring_slot), kv_pool(static_cast<bf16 const*>(p.kv_pool)),
          fresh_kv(static_cast<bf16 const*>(p.fresh_kv)), out(static_cast<bf16*>(p.out)),
          tokens(static_cast<int>(p.tokens)), sequences(static_cast<int>(p.sequences)),
          table_width(static_cast<int>(p.table_width)), kv_heads(static_cast<int>(p.kv_heads)),
          ring(static_cast<int>(p.ring)), window(p.window > 0 ? static_cast<int>(p.window) : kNO_WINDOW) {}
};

/// Byte offset of a 16-byte segment of a row in a tile of 256-byte rows. The XOR lets eight rows' same segment, as
/// ldmatrix reads them, fall into eight different groups of banks.
__device__ __forceinline__ int swizzled(int row, int segment) {
    return row * kROW_BYTES + ((segment ^ (row & 7)) << 4);
}

/// 2^x; 0 for -infinity.
__device__ __forceinline__ float exp2Fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// Factor that brings a partial result with maximum `old` to maximum `now`; 0 where the part saw no key.
__device__ __forceinline__ float rescale(float old, float now) {
    return old == kMINUS_INFINITY ? 0.0f : exp2Fast(old - now);
}

/// Add one to a counter; the result is its value before. What this thread's block wrote before is visible to blocks
/// that count later, and what earlier ones wrote is visible here. (A fence of __threadfence's strength would cost
/// more.)
__device__ __forceinline__ unsigned long long countArrival(unsigned long long* counter) {
    unsigned long long before;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
    return before;
}

/// Place in the ring of the position `row` (below 64) behind the one at place `start`.
__device__ __forceinline__ int ringPlace(int start, int row, int ring) {
    int place = start + row;
    place -= place >= ring ? ring : 0;
    return place - (place >= ring ? ring : 0); // Enough from kLEAST_RING on.
}

/// Inclusive prefix sum over the lanes.
__device__ __forceinline__ int warpPrefixSum(int x, int lane) {
#pragma unroll
    for (int step = 1; step < kWARP; step *= 2) {
        int const other = __shfl_up_sync(0xFFFFFFFFu, x, step);
        x += lane >= step ? other : 0;
    }
    return x;
}

/// Zero the rows that no sequence owns, so that whatever is computed from them stays finite.
__device__ __forceinline__ void zeroPadding(Arguments const& a) {
    int const vectors = a.kv_heads * kGROUP * kROW_SEGMENTS;
    for (int row = a.query_start[a.sequences] + blockIdx.x; row < a.tokens; row += gridDim.x) {
        uint4* const target = reinterpret_cast<uint4*>(a.out) + static_cast<int64_t>(row) * vectors;
        for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
            target[i] = make_uint4(0, 0, 0, 0);
        }
    }
}

} // namespace flint::attention
