// One row of logits: reading it as it is or adjusted by bias, mask and penalties, the order of its values, and their
// integer weights.
#pragma once

#include "kernels/device.cuh"
#include "kernels/sample.h"

#include <cfloat>
#include <cmath>
#include <cstdint>

namespace flint::sample {

constexpr int kTOP = 20;          // Alternatives reported per row: MAX_LOGPROBS of ops.py.
constexpr int kGROUP = 4 * kWARP; // Logits that a warp reads at once, and that share one maximum.
constexpr int32_t kPROMPT_FLAG = 1 << 30;
constexpr int32_t kUSE_BIAS = 1, kUSE_MASK = 2; // USE_BIAS and USE_MASK of ops.py.
constexpr int kMASK_TOKENS = 32;                // Tokens of a word of the mask: MASK_TOKENS of ops.py.
constexpr int kNO_TOKEN = -1;

/// What sampleGroupsKernel leaves for sampleDrawKernel.
struct Groups {
    float2* raw;        ///< [R, groups]: maximum l and sum of exp(l - maximum); NaN if a logit is not finite
    float* adjustedMax; ///< [R, groups], only of adjusted rows; -inf if all is forbidden, NaN if a logit is NaN
    uint32_t* rowsDone; ///< rows that have their token
    int groups;         ///< ceil(V / kGROUP)
};

/// A row's logits and what changes them.
struct Row {
    float const* logits;
    float const* bias;     ///< nullptr: none
    int32_t const* mask;   ///< nullptr: every token is allowed
    int32_t const* counts; ///< nullptr: no penalties, or neutral ones
    float repetition, presence, frequency;
    int vocabulary;
    int forced;    ///< the row's token, -1: draw
    bool adjusted; ///< by bias, mask or penalties
    bool valid;    ///< its slot and forced token exist

    /// Logits 4 lane .. of a group into `out`, adjusted (forbidden tokens to -inf) or not; false: there are none.
    template <bool Adjusted>
    __device__ __forceinline__ bool load(int group, int lane, float (&out)[4]) const;

    __device__ __forceinline__ void adjust(int first, float (&l)[4]) const;

    __device__ __forceinline__ float penalise(float l, int32_t count) const {
        int32_t const generated = count & (kPROMPT_FLAG - 1);
        if (count != 0) {
            l = l > 0 ? __fdiv_rn(l, repetition) : __fmul_rn(l, repetition);
        }
        l = __fsub_rn(l, __fmul_rn(frequency, static_cast<float>(generated)));
        return generated > 0 ? __fsub_rn(l, presence) : l;
    }
};

/// Four neighbours, aligned to 16 bytes.
template <typename Vector, typename T>
__device__ __forceinline__ void loadFour(T const* source, T (&out)[4]) {
    Vector const vector = *reinterpret_cast<Vector const*>(source);
    out[0] = vector.x, out[1] = vector.y, out[2] = vector.z, out[3] = vector.w;
}

/// Bias, penalties and mask, in this order, on the logits of four tokens from `first` on.
__device__ __forceinline__ void Row::adjust(int first, float (&l)[4]) const {
    uint32_t allowed = 0xFu;
    if (mask != nullptr) {
        allowed = static_cast<uint32_t>(mask[first / kMASK_TOKENS]) >> first % kMASK_TOKENS;
    }
    if (bias != nullptr) {
        float added[4];
        loadFour<float4>(bias + first, added);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            l[i] = __fadd_rn(l[i], added[i]);
            allowed &= ~(static_cast<uint32_t>(added[i] == -INFINITY) << i);
        }
    }
    if (counts != nullptr) {
        int32_t count[4];
        loadFour<int4>(counts + first, count);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            l[i] = penalise(l[i], count[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        l[i] = fabsf(l[i]) > FLT_MAX ? copysignf(FLT_MAX, l[i]) : l[i];
        l[i] = allowed >> i & 1 ? l[i] : -INFINITY;
    }
}

template <bool Adjusted>
__device__ __forceinline__ bool Row::load(int group, int lane, float (&out)[4]) const {
    int const first = group * kGROUP + lane * 4;
    if (first >= vocabulary) {
        return false;
    }
    loadFour<float4>(logits + first, out);
    if (Adjusted && adjusted) {
        adjust(first, out);
    }
    return true;
}

/// visit(logit, index) for the groups groupAt(n), n = begin, begin + step .. of a row; called by a whole warp.
template <bool Adjusted, typename GroupAt, typename Visit>
__device__ __forceinline__ void forEachLogit(Row const& row, int begin, int end, int step, GroupAt groupAt,
                                             Visit visit) {
    constexpr int kAT_ONCE = 2; // Loads in flight per lane.
    int const lane = threadIdx.x % kWARP;
    for (int n = begin; n < end; n += kAT_ONCE * step) {
        float l[kAT_ONCE][4];
        int group[kAT_ONCE];
        bool found[kAT_ONCE];
#pragma unroll
        for (int k = 0; k < kAT_ONCE; ++k) {
            int const place = n + k * step;
            group[k] = place < end ? groupAt(place) : 0;
            found[k] = place < end && row.load<Adjusted>(group[k], lane, l[k]);
        }
#pragma unroll
        for (int k = 0; k < kAT_ONCE; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (found[k]) {
                    visit(l[k][i], group[k] * kGROUP + lane * 4 + i);
                }
            }
        }
    }
}

/// The slot whose states a row reads and changes; -1: none. It may not exist.
__device__ __forceinline__ int slotOf(SampleParams const& params, int64_t row) {
    int const slot = params.sample_slot[row];
    return params.forced_token[row] < 0 ? slot : -1;
}

__device__ __forceinline__ Row rowOf(SampleParams const& params, int64_t row) {
    Row result;
    int const slot = slotOf(params, row), flags = params.sample_flags[row];
    result.logits = params.logits + row * params.vocabulary;
    result.repetition = params.repetition_penalty[row];
    result.presence = params.presence_penalty[row];
    result.frequency = params.frequency_penalty[row];
    result.vocabulary = static_cast<int>(params.vocabulary);
    result.forced = params.forced_token[row];
    result.valid = slot < params.slots && result.forced < result.vocabulary;
    // Neutral penalties change no bit of a finite logit but the sign of zero, which nothing here looks at.
    bool const neutral = result.repetition == 1.0f && result.presence == 0.0f && result.frequency == 0.0f;
    bool const stateful = slot >= 0 && result.valid;
    int64_t const first = slot * params.vocabulary;
    result.bias = stateful && flags & kUSE_BIAS ? params.logit_bias + first : nullptr;
    result.mask = stateful && flags & kUSE_MASK ? params.token_mask + first / kMASK_TOKENS : nullptr;
    result.counts = stateful && !neutral ? params.token_counts + first : nullptr;
    result.adjusted = result.bias != nullptr || result.mask != nullptr || result.counts != nullptr;
    return result;
}

__device__ __forceinline__ bool isFinite(float x) {
    return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u;
}

/// Unsigned order of the results = order of the values, -inf the least; 0 is below all of them. -0 and 0 are one value.
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
