// What decode and prefill share where keys are split over blocks: the partial results, and merging those of a row.
#pragma once

#include "kernels/attention.cuh"

#include <cstddef>

namespace flint::attention {

constexpr int kMAX_SPLITS = 128; // Decode's counts of them must fit kCOUNT_BITS.

constexpr size_t aligned(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

struct SplitArguments : Arguments {
    int max_splits = 1;         // Of a row.
    float2* stats = nullptr;    // [T, Hq, max_splits]: maximum, row sum
    float4* partials = nullptr; // [T, Hq, max_splits, 128], not normalised

    explicit SplitArguments(SinkAttentionParams const& p) : Arguments(p) {}

    /// Give every row room for `splits` partial results.
    void splitInto(int splits, uint8_t* workspace) {
        int64_t const results = int64_t{1} * tokens * kv_heads * kGROUP * splits;
        max_splits = splits;
        stats = reinterpret_cast<float2*>(workspace);
        partials = reinterpret_cast<float4*>(workspace + aligned(static_cast<size_t>(results) * sizeof(float2)));
    }
};

/// Workspace that so many partial results take.
constexpr size_t partialBytes(int64_t results) {
    return aligned(static_cast<size_t>(results) * sizeof(float2)) +
           static_cast<size_t>(results) * kHEAD_DIM * sizeof(float);
}

__device__ __forceinline__ void accumulate(float4& sum, float weight, float4 value) {
    sum.x += weight * value.x;
    sum.y += weight * value.y;
    sum.z += weight * value.z;
    sum.w += weight * value.w;
}

/// Normalise with the head's sink and store a lane's 4 dimensions of a row. top, sum: over all keys.
__device__ __forceinline__ void storeRow(Arguments const& a, int64_t row, int head, float sink, float top, float sum,
                                         float4 value, int lane) {
    float const logit = sink * kLOG2E;
    float const all = fmaxf(top, logit);
    float const part = rescale(top, all);
    float const factor = __fdividef(part, sum * part + exp2Fast(logit - all)); // Within 2 units in the last place.
    uint2* const target = reinterpret_cast<uint2*>(a.out + (row * a.kv_heads * kGROUP + head) * kHEAD_DIM) + lane;
    *target = make_uint2(packBf16(value.x * factor, value.y * factor), packBf16(value.z * factor, value.w * factor));
}

/// Merge the partial results of a row in order of split, with the sink; a lane has 4 dimensions. `Batch`: splits whose
/// loads are under way together.
template <int Batch>
__device__ __forceinline__ void mergeRow(SplitArguments const& a, int64_t row, int head, int splits, int lane) {
    int64_t const first = (row * a.kv_heads * kGROUP + head) * a.max_splits;
    float4 parts[Batch];
    auto const load = [&](int base) {
#pragma unroll
        for (int i = 0; i < Batch; ++i) {
            parts[i] = base + i < splits ? __ldcg(a.partials + (first + base + i) * kWARP + lane) : float4{};
        }
    };
    load(0);
    // A lane has the statistics of every 32nd split.
    float2 stats[kMAX_SPLITS / kWARP];
    float top = kMINUS_INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMAX_SPLITS / kWARP; ++i) {
        int const split = i * kWARP + lane;
        stats[i] = split < splits ? __ldcg(a.stats + first + split) : make_float2(kMINUS_INFINITY, 0.0f);
        top = fmaxf(top, stats[i].x);
    }
#pragma unroll
    for (int mask = kWARP / 2; mask > 0; mask /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, mask));
    }
    float weights[kMAX_SPLITS / kWARP];
#pragma unroll
    for (int i = 0; i < kMAX_SPLITS / kWARP; ++i) {
        weights[i] = rescale(stats[i].x, top);
        sum += stats[i].y * weights[i];
    }
    sum = warpSum(sum);
    float4 value{};
    for (int base = 0;;) {
#pragma unroll
        for (int i = 0; i < Batch; ++i) {
            int const split = base + i;
            float own = weights[0];
#pragma unroll
            for (int k = 1; k < kMAX_SPLITS / kWARP; ++k) {
                own = split / kWARP == k ? weights[k] : own;
            }
            float const weight = __shfl_sync(0xFFFFFFFFu, own, split % kWARP);
            accumulate(value, split < splits ? weight : 0.0f, parts[i]);
        }
        base += Batch;
        if (base >= splits) {
            break;
        }
        load(base);
    }
    storeRow(a, row, head, a.sinks[head], top, sum, value, lane);
}

} // namespace flint::attention
