// One row of logits: reading it with its penalties, the order of its values, and their integer weights.
#pragma once

#include "kernels/device.cuh"
#include "kernels/sample.h"

#include <cfloat>
#include <cstdint>

namespace flint::sample {

constexpr int kTOP = 20;          // Alternatives reported per row: MAX_LOGPROBS of ops.py.
constexpr int kGROUP = 4 * kWARP; // Logits that a warp reads at once, and that share one maximum.
constexpr int32_t kPROMPT_FLAG = 1 << 30;
constexpr int kNO_TOKEN = -1;

/// What sampleGroupsKernel leaves for sampleDrawKernel.
struct Groups {
    float2* raw;         ///< [R, groups]: maximum l and sum of exp(l - maximum); NaN if a logit is not finite
    float* penalisedMax; ///< [R, groups], only of rows with penalties; NaN if a penalised logit is NaN
    uint32_t* rowsDone;  ///< rows that have their token
    int groups;          ///< ceil(V / kGROUP)
    bool aligned;        ///< every row starts at a multiple of 16 bytes
};

/// A row's logits and what changes them.
struct Row {
    float const* logits;
    int32_t const* counts; ///< nullptr: no penalties, or neutral ones
    float repetition, presence, frequency;
    int vocabulary;
    bool aligned;
    bool validSlot;

    /// Logits 4 lane .. of a group into `out`, penalised or not; returns how many there are.
    template <bool Penalised>
    __device__ __forceinline__ int load(int group, int lane, float (&out)[4]) const;

    __device__ __forceinline__ float penalise(float l, int32_t count) const {
        int32_t const generated = count & (kPROMPT_FLAG - 1);
        if (count != 0) {
            l = l > 0 ? __fdiv_rn(l, repetition) : __fmul_rn(l, repetition);
        }
        l = __fsub_rn(l, __fmul_rn(frequency, static_cast<float>(generated)));
        l = generated > 0 ? __fsub_rn(l, presence) : l;
        return fabsf(l) > FLT_MAX ? copysignf(FLT_MAX, l) : l;
    }
};

/// Four neighbours, of which those below `end` exist; returns how many.
template <typename Vector, typename T>
__device__ __forceinline__ int loadFour(T const* row, int first, int end, bool aligned, T (&out)[4]) {
    if (aligned) {
        if (first >= end) {
            return 0;
        }
        Vector const vector = *reinterpret_cast<Vector const*>(row + first);
        out[0] = vector.x, out[1] = vector.y, out[2] = vector.z, out[3] = vector.w;
        return 4;
    }
    int const found = max(0, min(4, end - first));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[i] = i < found ? row[first + i] : T{};
    }
    return found;
}

template <bool Penalised>
__device__ __forceinline__ int Row::load(int group, int lane, float (&out)[4]) const {
    int const first = group * kGROUP + lane * 4;
    int const found = loadFour<float4>(logits, first, vocabulary, aligned, out);
    if (Penalised && counts != nullptr && found > 0) {
        int32_t count[4];
        loadFour<int4>(counts, first, vocabulary, aligned, count);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = penalise(out[i], count[i]);
        }
    }
    return found;
}

/// visit(logit, index) for the groups groupAt(n), n = begin, begin + step .. of a row; called by a whole warp.
template <bool Penalised, typename GroupAt, typename Visit>
__device__ __forceinline__ void forEachLogit(Row const& row, int begin, int end, int step, GroupAt groupAt,
                                             Visit visit) {
    constexpr int kAT_ONCE = 2; // Loads in flight per lane.
    int const lane = threadIdx.x % kWARP;
    for (int n = begin; n < end; n += kAT_ONCE * step) {
        float l[kAT_ONCE][4];
        int group[kAT_ONCE], valid[kAT_ONCE];
#pragma unroll
        for (int k = 0; k < kAT_ONCE; ++k) {
            int const place = n + k * step;
            group[k] = place < end ? groupAt(place) : 0;
            valid[k] = place < end ? row.load<Penalised>(group[k], lane, l[k]) : 0;
        }
#pragma unroll
        for (int k = 0; k < kAT_ONCE; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i < valid[k]) {
                    visit(l[k][i], group[k] * kGROUP + lane * 4 + i);
                }
            }
        }
    }
}

__device__ __forceinline__ Row rowOf(SampleParams const& params, Groups const& groups, int row) {
    Row result;
    int const slot = params.sample_slot[row];
    result.logits = params.logits + row * params.vocabulary;
    result.repetition = params.repetition_penalty[row];
    result.presence = params.presence_penalty[row];
    result.frequency = params.frequency_penalty[row];
    result.vocabulary = static_cast<int>(params.vocabulary);
    result.aligned = groups.aligned;
    result.validSlot = slot < params.slots;
    // Neutral penalties change no bit of a finite logit but the sign of zero, which nothing here looks at.
    bool const neutral = result.repetition == 1.0f && result.presence == 0.0f && result.frequency == 0.0f;
    bool const counted = slot >= 0 && result.validSlot && !neutral;
    result.counts = counted ? params.token_counts + slot * params.vocabulary : nullptr;
    return result;
}

__device__ __forceinline__ bool isFinite(float x) {
    return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u;
}

/// Unsigned order of the results = order of finite values; 0 is below all of them. -0 and 0 are one value.
__device__ __forceinline__ uint32_t orderOf(float x) {
    uint32_t const bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float valueOf(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

/// Unsigned order of the results = order of tokens: by value, ties to the lowest index. No two tokens are equal.
__device__ __forceinline__ uint64_t keyOf(float value, int index) {
    return static_cast<uint64_t>(orderOf(value)) << 32 | ~static_cast<uint32_t>(index);
}

__device__ __forceinline__ uint32_t orderOfKey(uint64_t key) {
    return static_cast<uint32_t>(key >> 32);
}
__device__ __forceinline__ int indexOfKey(uint64_t key) {
    return static_cast<int>(~static_cast<uint32_t>(key));
}

/// Temperature, top-p, min-p and the draw of one row.
struct Draw {
    float temperature, topP;
    float minWeight; ///< weights below are dropped by min-p
    uint64_t random;

    /// floor(exp((l - largest) / temperature) * 2^40), 0 where min-p drops it: an integer, exact in FP32.
    __device__ __forceinline__ float weight(float l, float largest) const {
        // `exp_weights` of reference_sample.py; each operation is rounded, none fused.
        float const x = __fdiv_rn(__fsub_rn(l, largest), temperature);
        float const y = fmaxf(__fmul_rn(x, 1.44269504f), -64.0f);
        if (y < -41.0f) {
            return 0;
        }
        float const n = rintf(y);
        float const f = __fsub_rn(y, n);
        constexpr float kEXP2[] = {0.00133335581f, 0.00961812911f, 0.0555041087f, 0.240226507f, 0.693147181f, 1.0f};
        float value = 0.000154035304f;
#pragma unroll
        for (float coefficient : kEXP2) {
            value = __fadd_rn(__fmul_rn(value, f), coefficient);
        }
        float const power = __int_as_float((static_cast<int>(n) + 40 + 127) << 23);
        float const result = truncf(__fmul_rn(value, power));
        return result < minWeight ? 0.0f : result;
    }

    /// The sum of larger weights at which top-p stops keeping.
    __device__ __forceinline__ uint64_t limit(uint64_t total) const {
        double const product = __dmul_rn(static_cast<double>(topP), __ull2double_rn(total));
        return product < 1.0 ? 1 : __double2ull_rz(product);
    }

    __device__ __forceinline__ uint64_t target(uint64_t total) const { return __umul64hi(random, total); }
};

} // namespace flint::sample
