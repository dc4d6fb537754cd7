#include "kernels/mlp.h"

#include "kernels/gemm.h"
#include "kernels/linear.h"
#include "kernels/mlp_internal.h"
#include "kernels/norm_rows.h"

namespace flint {

size_t mlpWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t intermediate) {
    return tokens * (hidden + intermediate) * sizeof(bf16);
}

cudaError_t launchMlp(MlpParams const& params, cudaStream_t stream) {
    auto* const act = static_cast<bf16*>(params.workspace);
    bf16* const x = act + int64_t{params.tokens} * params.intermediate;
    if (params.tokens <= kDECODE_TOKENS) {
        if (cudaError_t const error = launchMlpUpDecode(params, x, act, stream); error != cudaSuccess) {
            return error;
        }
        LinearParams const down{act,           params.down, params.down_scale, params.out,          nullptr,
                                params.format, true,        params.tokens,     params.intermediate, params.hidden};
        return launchLinearDecode(down, stream);
    }
    NormParams const norm{params.delta, params.residual, params.norm, params.residual_out, params.eps, params.tokens};
    if (cudaError_t const error = launchNormRows(norm, params.hidden, RowOrder::kPREFILL, x, stream);
        error != cudaSuccess) {
        return error;
    }
    GemmParams const up{params.format,
                        GemmEpilogue::kSwiGlu,
                        x,
                        params.gate_up,
                        params.gate_up_scale,
                        act,
                        params.tokens,
                        2 * int64_t{params.intermediate},
                        params.hidden};
    if (cudaError_t const error = launchGemm(up, stream); error != cudaSuccess) {
        return error;
    }
    GemmParams const down{params.format, GemmEpilogue::kStore, act,           params.down,        params.down_scale,
                          params.out,    params.tokens,        params.hidden, params.intermediate};
    return launchGemm(down, stream);
}

} // namespace flint
