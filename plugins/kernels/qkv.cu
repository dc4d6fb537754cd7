// NormQkvRope for any number of tokens: the one-kernel path for a few, else norm, matrix product, and a last pass over
// the heads.
#include "kernels/qkv.h"

#include "kernels/gemm.h"
#include "kernels/kv_write.cuh"
#include "kernels/launch.h"
#include "kernels/norm_rows.h"
#include "kernels/qkv_internal.h"

namespace flint {

namespace {

constexpr int kFINISH_WARPS = 8;

/// Grid (T): q/k norm, RoPE and the writes of one token; a warp takes a head at a time. `raw` [T, (Hq + 2 Hkv) 128]
/// bf16.
__global__ void __launch_bounds__(kFINISH_WARPS* kWARP) qkvFinishKernel(QkvParams const params, bf16 const* raw) {
    waitForPredecessor();
    allowSuccessor();
    int const token = blockIdx.x, lane = threadIdx.x % kWARP, warp = threadIdx.x / kWARP;
    int const position = params.positions[token];
    int const heads = params.heads + 2 * params.kv_heads;
    for (int head = warp; head < heads; head += kFINISH_WARPS) {
        bool const isQ = head < params.heads, isK = !isQ && head < params.heads + params.kv_heads;
        // A lane holds dimensions 2 lane, 2 lane + 1 and those 64 further on, RoPE's partners.
        int const low = 2 * lane, high = low + kHEAD_DIM / 2;
        bf16 const* const source = raw + (int64_t{token} * heads + head) * kHEAD_DIM;
        uint32_t words[2] = {*reinterpret_cast<uint32_t const*>(source + low),
                             *reinterpret_cast<uint32_t const*>(source + high)};
        if (isQ || isK) {
            float2 const a = unpackBf16(words[0]), b = unpackBf16(words[1]);
            float const squares = warpSum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y);
            float const inverse = rsqrtf(squares / kHEAD_DIM + params.eps);
            float const* const weight = isQ ? params.q_norm : params.k_norm;
            float const n[4] = {roundBf16(a.x * inverse * weight[low]), roundBf16(a.y * inverse * weight[low + 1]),
                                roundBf16(b.x * inverse * weight[high]), roundBf16(b.y * inverse * weight[high + 1])};
            if (params.rope != nullptr) {
                float const* const table = params.rope + int64_t{position} * kHEAD_DIM;
                words[0] = packBf16(rotate(n[0], n[2], table, low), rotate(n[1], n[3], table, low + 1));
                words[1] = packBf16(rotate(n[2], n[0], table, high), rotate(n[3], n[1], table, high + 1));
            } else {
                words[0] = packBf16(n[0], n[1]);
                words[1] = packBf16(n[2], n[3]);
            }
        }
        bf16* target;
        if (isQ) {
            target = params.q + (int64_t{token} * params.heads + head) * kHEAD_DIM;
        } else {
            int const kvHead = head - params.heads - (isK ? 0 : params.kv_heads);
            target = kvVector(params.kv, token, position, kvHead, isK ? 0 : 1);
        }
        if (target != nullptr) {
            *reinterpret_cast<uint32_t*>(target + low) = words[0];
            *reinterpret_cast<uint32_t*>(target + high) = words[1];
        }
    }
}

} // namespace

size_t qkvWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t rows) {
    return tokens <= kDECODE_TOKENS ? 0 : tokens * (hidden + rows) * sizeof(bf16);
}

cudaError_t launchQkv(QkvParams const& params, cudaStream_t stream) {
    if (params.tokens <= kDECODE_TOKENS) {
        return launchQkvDecode(params, stream);
    }
    int64_t const rows = int64_t{params.heads + 2 * params.kv_heads} * kHEAD_DIM;
    auto* const x = static_cast<bf16*>(params.workspace);
    bf16* const raw = x + int64_t{params.tokens} * params.hidden;
    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    if (cudaError_t const error = launchNormRows(norm, params.hidden, x, stream); error != cudaSuccess) {
        return error;
    }
    GemmParams product{};
    product.format = params.format;
    product.epilogue = GemmEpilogue::kStore;
    product.x = x;
    product.weight = params.weight;
    product.scale = params.scale;
    product.segment_row[0] = int64_t{params.heads} * kHEAD_DIM;
    product.segment_row[1] = int64_t{params.heads + params.kv_heads} * kHEAD_DIM;
    product.y = raw;
    product.tokens = params.tokens;
    product.rows = rows;
    product.columns = params.hidden;
    if (cudaError_t const error = launchGemm(product, stream); error != cudaSuccess) {
        return error;
    }
    return launchOverlapped(qkvFinishKernel, dim3(params.tokens), dim3(kFINISH_WARPS * kWARP), 0, stream, params,
                            static_cast<bf16 const*>(raw));
}

} // namespace flint
