// Decode: merging partial results, first those of a block's groups of warps, then those of a sequence's splits.
#pragma once

#include "kernels/attention_chunk.cuh"

namespace flint::attention {

/// Splits whose loads are under way together: all that the H200 makes of a sequence, and of one in a large batch.
template <int Warps>
constexpr int kMERGE_BATCH = Warps == 8 ? 33 : 17;

constexpr int kCOUNT_BITS = 8;
constexpr unsigned long long kCOUNTER_TAG = 0xFFC5A3E19D5B71ull; // Its high word is a NaN that no result here has.

/// Row stride of partial results in shared memory: lanes of a fragment then hit 32 different banks.
constexpr int kMERGE_STRIDE = kHEAD_DIM + 4;

/// Make a counter valid. Whatever word lies there is replaced unless it has the tag, and only counters have it: they
/// are back at zero when a kernel ends. Each block does this before it arrives, so none can undo an arrival.
__device__ __forceinline__ void openCounter(unsigned long long* counter, unsigned long long found) {
    if (found >> kCOUNT_BITS != kCOUNTER_TAG) {
        atomicCAS(counter, found, kCOUNTER_TAG << kCOUNT_BITS);
    }
}

/// Count the arrival of one of `splits`; true for the last of them, which then sees the others' partial results.
__device__ __forceinline__ bool countSplit(unsigned long long* counter, int splits) {
    unsigned long long const before = countArrival(counter);
    bool const last = static_cast<int>(before & ((1u << kCOUNT_BITS) - 1)) == splits - 1;
    if (last) {
        *counter = kCOUNTER_TAG << kCOUNT_BITS;
    }
    return last;
}

/// countSplit by a block.
__device__ __forceinline__ bool arriveLast(unsigned long long* counter, int splits) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = countSplit(counter, splits);
    }
    __syncthreads();
    return last;
}

/// Merge the splits of one KV head of a sequence; a warp takes a row.
template <int Warps>
__device__ __noinline__ void mergeSplits(DecodeArguments const& a, int firstRow, int tokens, int kvHead, int splits) {
    for (int r = threadIdx.x / kWARP; r < tokens * kGROUP; r += Warps) {
        mergeRow<kMERGE_BATCH<Warps>>(a, firstRow + r / kGROUP, kvHead * kGROUP + r % kGROUP, splits,
                                      threadIdx.x % kWARP);
    }
}

/// Leave what a warp knows of a token in shared memory: outs [8, kMERGE_STRIDE], stats [8].
template <int Tokens>
__device__ __forceinline__ void leaveResult(WarpState<Tokens>& state, int n, float* outs, float2* stats, int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int mask = 4; mask < kWARP; mask *= 2) {
            state.sum[n][j] += __shfl_xor_sync(0xFFFFFFFFu, state.sum[n][j], mask);
        }
        int const row = lane % 4 * 2 + j;
        if (lane < 4) {
            stats[row] = make_float2(state.top[n][j], state.sum[n][j]);
        }
#pragma unroll
        for (int tile = 0; tile < kHEAD_DIM / 16; ++tile) {
            outs[row * kMERGE_STRIDE + tile * 16 + lane / 4] = state.out[n][tile][j];
            outs[row * kMERGE_STRIDE + tile * 16 + lane / 4 + 8] = state.out[n][tile][j + 2];
        }
    }
}

/// A row's result, not normalised; a lane has 4 dimensions.
struct RowResult {
    float top, sum;
    float4 value;
};

/// Merge the `Parts` results of a row in shared memory, in their order; the strides are in elements.
template <int Parts>
__device__ __forceinline__ RowResult mergeResults(float const* outs, int outStride, float2 const* stats,
                                                  int statsStride, int lane) {
    RowResult row{kMINUS_INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int i = 0; i < Parts; ++i) {
        row.top = fmaxf(row.top, stats[i * statsStride].x);
    }
#pragma unroll
    for (int i = 0; i < Parts; ++i) {
        float2 const part = stats[i * statsStride];
        float const weight = rescale(part.x, row.top);
        row.sum += part.y * weight;
        accumulate(row.value, weight, reinterpret_cast<float4 const*>(outs + i * outStride)[lane]);
    }
    return row;
}

/// Merge the groups' results of an item through shared memory, and store them or leave them as a partial result.
template <int Warps, int Tokens, int Share>
__device__ __forceinline__ void finishItem(DecodeArguments const& a, Item const& item, WarpState<Tokens>& state,
                                           uint8_t* shared) {
    constexpr int GROUPS = Warps / Share;
    constexpr int ROWS = Share * Tokens * kGROUP;
    int const warp = threadIdx.x / kWARP, lane = threadIdx.x % kWARP;
    float* const outs = reinterpret_cast<float*>(shared); // [GROUPS, ROWS, kMERGE_STRIDE]
    float2* const stats = reinterpret_cast<float2*>(outs + GROUPS * ROWS * kMERGE_STRIDE); // [GROUPS, ROWS]
    __syncthreads(); // The chunks in this memory have been used.
#pragma unroll
    for (int n = 0; n < Tokens; ++n) {
        int const first = warp * Tokens * kGROUP + n * kGROUP;
        leaveResult(state, n, outs + first * kMERGE_STRIDE, stats + first, lane);
    }
    __syncthreads();
    for (int r = warp; r < item.tokens * kGROUP; r += Warps) {
        RowResult const result =
            mergeResults<GROUPS>(outs + r * kMERGE_STRIDE, ROWS * kMERGE_STRIDE, stats + r, ROWS, lane);
        int64_t const row = item.row + r / kGROUP;
        int const head = item.head * kGROUP + r % kGROUP;
        if (item.splits == 1) {
            storeRow(a, row, head, a.sinks[head], result.top, result.sum, result.value, lane);
            continue;
        }
        int64_t const partial = (row * a.kv_heads * kGROUP + head) * a.max_splits + item.split;
        __stcg(a.partials + partial * kWARP + lane, result.value);
        if (lane == 0) {
            __stcg(a.stats + partial, make_float2(result.top, result.sum));
        }
    }
    if (item.splits == 1) {
        __syncthreads(); // Before the next item's chunks overwrite the results.
    } else if (arriveLast(a.counters + item.sequence * a.kv_heads + item.head, item.splits)) {
        mergeSplits<Warps>(a, item.row, item.tokens, item.head, item.splits);
    }
}

} // namespace flint::attention
