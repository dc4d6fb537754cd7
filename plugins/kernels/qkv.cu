// NormQkvRope: projection (one token: with the norm in one kernel; up to eight: norm, then the low-latency Linear;
// more: norm, then a matrix product), and a last pass over the heads.
#include "kernels/qkv.h"

#include "kernels/gemm.h"
#include "kernels/kv_write.cuh"
#include "kernels/launch.h"
#include "kernels/linear.h"
#include "kernels/norm_rows.h"
#include "kernels/qkv_internal.h"

namespace flint {

namespace {

constexpr int kFINISH_WARPS = 8;

/// RoPE (NeoX halves) of a dimension and its partner 64 further on, in FP32; the caller rounds.
__device__ __forceinline__ float2 rotate(float first, float second, float cosine, float sine) {
    return make_float2(first * cosine - second * sine, second * cosine + first * sine);
}

/// Grid (T, ceil(heads / 8)): q/k norm, RoPE and the write of one head of one token by a warp. `raw` [T, (Hq + 2 Hkv)
/// 128] bf16. A lane holds dimensions 2 lane, 2 lane + 1 and RoPE's partners of them, 64 further on.
__global__ void __launch_bounds__(kFINISH_WARPS* kWARP) qkvFinishKernel(QkvParams const params, bf16 const* raw) {
    int const token = blockIdx.x, lane = threadIdx.x % kWARP;
    int const head = blockIdx.y * kFINISH_WARPS + threadIdx.x / kWARP;
    int const heads = params.heads + 2 * params.kv_heads;
    if (head >= heads) {
        waitForPredecessor(); // a kernel's end must not overtake its predecessor's
        return;
    }
    bool const isQ = head < params.heads, isK = !isQ && head < params.heads + params.kv_heads;
    int const low = 2 * lane, high = low + kHEAD_DIM / 2;
    allowSuccessor();
    // What the step's arrays and the weights say does not depend on the kernel before this one.
    int const position = __ldg(params.positions + token);
    bf16* target = params.q + (int64_t{token} * params.heads + head) * kHEAD_DIM;
    if (!isQ) {
        int const kvHead = head - params.heads - (isK ? 0 : params.kv_heads);
        target = kvVector(params.kv, token, position, kvHead, isK ? 0 : 1);
    }
    float2 lowWeight{}, highWeight{}, cosine{}, sine{};
    if (isQ || isK) {
        float const* const weight = isQ ? params.q_norm : params.k_norm;
        lowWeight = __ldg(reinterpret_cast<float2 const*>(weight + low));
        highWeight = __ldg(reinterpret_cast<float2 const*>(weight + high));
        if (params.rope != nullptr) {
            float const* const table = params.rope + int64_t{position} * kHEAD_DIM;
            cosine = __ldg(reinterpret_cast<float2 const*>(table + low));
            sine = __ldg(reinterpret_cast<float2 const*>(table + high));
        }
    }
    waitForPredecessor();

    bf16 const* const source = raw + (int64_t{token} * heads + head) * kHEAD_DIM;
    uint32_t words[2] = {*reinterpret_cast<uint32_t const*>(source + low),
                         *reinterpret_cast<uint32_t const*>(source + high)};
    if (isQ || isK) {
        float2 const a = unpackBf16(words[0]), b = unpackBf16(words[1]);
        float const squares = warpSum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y);
        float const inverse = rsqrtf(squares / kHEAD_DIM + params.eps);
        float2 first{roundBf16(a.x * inverse * lowWeight.x), roundBf16(b.x * inverse * highWeight.x)};
        float2 second{roundBf16(a.y * inverse * lowWeight.y), roundBf16(b.y * inverse * highWeight.y)};
        if (params.rope != nullptr) {
            first = rotate(first.x, first.y, cosine.x, sine.x);
            second = rotate(second.x, second.y, cosine.y, sine.y);
        }
        words[0] = packBf16(first.x, second.x);
        words[1] = packBf16(first.y, second.y);
    }
    if (target != nullptr) {
        *reinterpret_cast<uint32_t*>(target + low) = words[0];
        *reinterpret_cast<uint32_t*>(target + high) = words[1];
    }
}

cudaError_t project(QkvParams const& params, bf16* raw, bf16* x, cudaStream_t stream) {
    if (params.tokens == 1) {
        return launchQkvProject(params, raw, stream);
    }
    int const rows = (params.heads + 2 * params.kv_heads) * kHEAD_DIM;
    int const kRow = params.heads * kHEAD_DIM, vRow = (params.heads + params.kv_heads) * kHEAD_DIM;
    bool const few = params.tokens <= kDECODE_TOKENS;
    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    cudaError_t const error =
        launchNormRows(norm, params.hidden, few ? RowOrder::kDECODE : RowOrder::kPREFILL, x, stream);
    if (error != cudaSuccess) {
        return error;
    }
    if (few) {
        LinearParams const product{x,    params.weight, params.scale,  raw,  nullptr,     params.format,
                                   true, params.tokens, params.hidden, rows, {kRow, vRow}};
        return launchLinearDecode(product, stream);
    }
    GemmParams const product{params.format, GemmEpilogue::kStore, x,    params.weight, params.scale,
                             raw,           params.tokens,        rows, params.hidden, {kRow, vRow}};
    return launchGemm(product, stream);
}

} // namespace

size_t qkvWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t rows) {
    return tokens * (hidden + rows) * sizeof(bf16);
}

cudaError_t launchQkv(QkvParams const& params, cudaStream_t stream) {
    auto* const raw = static_cast<bf16*>(params.workspace);
    int const heads = params.heads + 2 * params.kv_heads;
    bf16* const x = raw + int64_t{params.tokens} * heads * kHEAD_DIM;
    if (cudaError_t const error = project(params, raw, x, stream); error != cudaSuccess) {
        return error;
    }
    dim3 const grid(params.tokens, (heads + kFINISH_WARPS - 1) / kFINISH_WARPS);
    return launchOverlapped(qkvFinishKernel, grid, dim3(kFINISH_WARPS * kWARP), 0, stream, params,
                            static_cast<bf16 const*>(raw));
}

} // namespace flint
