// NormQkvRope: up to eight tokens by the low-latency kernel (several: after a norm of their own); more: norm, matrix
// product, and a pass over the heads.
#include "kernels/qkv.h"

#include "kernels/gemm.h"
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
    HeadQuad const quad = HeadQuad::load(params, token, head, low);
    waitForPredecessor();

    bf16 const* const source = raw + (int64_t{token} * heads + head) * kHEAD_DIM;
    uint32_t words[2] = {*reinterpret_cast<uint32_t const*>(source + low),
                         *reinterpret_cast<uint32_t const*>(source + high)};
    if (head < params.heads + params.kv_heads) {
        quad.finish(params, warpSum(pairSquares(words[0]) + pairSquares(words[1])), words);
    }
    if (quad.target != nullptr) {
        *reinterpret_cast<uint32_t*>(quad.target + low) = words[0];
        *reinterpret_cast<uint32_t*>(quad.target + high) = words[1];
    }
}

} // namespace

size_t qkvWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t rows) {
    return tokens * (hidden + (tokens <= kDECODE_TOKENS ? 0 : rows)) * sizeof(bf16);
}

cudaError_t launchQkv(QkvParams const& params, cudaStream_t stream) {
    auto* const x = static_cast<bf16*>(params.workspace);
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
        return launchQkvDecode(params, x, stream);
    }
    int const heads = params.heads + 2 * params.kv_heads;
    int const kRow = params.heads * kHEAD_DIM, vRow = (params.heads + params.kv_heads) * kHEAD_DIM;
    bf16* const raw = x + int64_t{params.tokens} * params.hidden;
    GemmParams const product{
        params.format,     GemmEpilogue::kStore, x,           params.weight, params.scale, raw, params.tokens,
        heads * kHEAD_DIM, params.hidden,        {kRow, vRow}};
    if (cudaError_t const error = launchGemm(product, stream); error != cudaSuccess) {
        return error;
    }
    dim3 const grid(params.tokens, (heads + kFINISH_WARPS - 1) / kFINISH_WARPS);
    return launchOverlapped(qkvFinishKernel, grid, dim3(kFINISH_WARPS * kWARP), 0, stream, params,
                            static_cast<bf16 const*>(raw));
}

} // namespace flint
