// NormQkvRope: norm, projection (up to eight tokens: the low-latency kernels; more: a matrix product), and a pass over
// the heads.
#include "kernels/qkv.h"

#include "kernels/gemm.h"
#include "kernels/kv_write.cuh"
#include "kernels/launch.h"
#include "kernels/norm_rows.h"
#include "kernels/qkv_head.cuh"
#include "kernels/qkv_internal.h"
#include "kernels/slice.cuh"

namespace flint {

namespace {

constexpr int kFINISH_WARPS = 8;

/// Grid (T, ceil(heads / 8)): q/k norm, RoPE and the write of one head of one token by a warp. `raw` [T, (Hq + 2 Hkv)
/// 128] bf16.
__global__ void __launch_bounds__(kFINISH_WARPS* kWARP) qkvFinishKernel(QkvParams const params, bf16 const* raw) {
    int const token = blockIdx.x, lane = threadIdx.x % kWARP;
    int const head = blockIdx.y * kFINISH_WARPS + threadIdx.x / kWARP;
    int const heads = params.heads + 2 * params.kv_heads;
    if (head >= heads) {
        waitForPredecessor(); // a kernel's end must not overtake its predecessor's
        return;
    }
    int const low = 2 * lane, high = low + kHEAD_DIM / 2;
    allowSuccessor();
    // What the step's arrays and the weights say does not depend on the kernel before this one.
    bool const isQ = head < params.heads, isK = !isQ && head < params.heads + params.kv_heads;
    int const position = __ldg(params.positions + token);
    HeadQuad quad{};
    if (isQ || isK) {
        quad = HeadQuad::load(isQ ? params.q_norm : params.k_norm, params.rope, position, low);
    }
    bf16* target = params.q + (int64_t{token} * params.heads + head) * kHEAD_DIM;
    if (!isQ) {
        int const kvHead = head - params.heads - (isK ? 0 : params.kv_heads);
        target = kvVector(params.kv, token, position, kvHead, isK ? 0 : 1);
    }
    waitForPredecessor();

    bf16 const* const source = raw + (int64_t{token} * heads + head) * kHEAD_DIM;
    uint32_t words[2] = {*reinterpret_cast<uint32_t const*>(source + low),
                         *reinterpret_cast<uint32_t const*>(source + high)};
    if (isQ || isK) {
        quad.finish(params.eps, params.rope != nullptr, words);
    }
    if (target != nullptr) {
        *reinterpret_cast<uint32_t*>(target + low) = words[0];
        *reinterpret_cast<uint32_t*>(target + high) = words[1];
    }
}

} // namespace

int qkvRows(QkvParams const& params) {
    return (params.heads + 2 * params.kv_heads) * kHEAD_DIM;
}

size_t qkvWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t rows) {
    return tokens * (hidden + rows) * sizeof(bf16);
}

cudaError_t launchQkvProject(QkvParams const& params, cudaStream_t stream) {
    auto* const raw = static_cast<bf16*>(params.workspace);
    bf16* const x = raw + int64_t{params.tokens} * qkvRows(params);
    bool const few = params.tokens <= kDECODE_TOKENS;
    if (params.tokens > 1) {
        NormParams const norm{params.delta,        params.residual, params.norm,
                              params.residual_out, params.eps,      params.tokens};
        RowOrder const order = few ? RowOrder::kDECODE : RowOrder::kPREFILL;
        if (cudaError_t const error = launchNormRows(norm, params.hidden, order, x, stream); error != cudaSuccess) {
            return error;
        }
    }
    if (few) {
        return launchQkvDecode(params, x, raw, stream);
    }
    int const kRow = params.heads * kHEAD_DIM, vRow = (params.heads + params.kv_heads) * kHEAD_DIM;
    GemmParams const product{
        params.format,   GemmEpilogue::kStore, x,           params.weight, params.scale, raw, params.tokens,
        qkvRows(params), params.hidden,        {kRow, vRow}};
    return launchGemm(product, stream);
}

cudaError_t launchQkv(QkvParams const& params, cudaStream_t stream) {
    if (cudaError_t const error = launchQkvProject(params, stream); error != cudaSuccess) {
        return error;
    }
    int const heads = params.heads + 2 * params.kv_heads;
    dim3 const grid(params.tokens, (heads + kFINISH_WARPS - 1) / kFINISH_WARPS);
    return launchOverlapped(qkvFinishKernel, grid, dim3(kFINISH_WARPS * kWARP), 0, stream, params,
                            static_cast<bf16 const*>(params.workspace));
}

} // namespace flint
