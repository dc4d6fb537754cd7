#include "kernels/linear.h"

#include "kernels/gemm.h"
#include "kernels/slice.cuh"

namespace flint {

size_t linearWorkspaceBytes(int64_t tokens, int64_t columns) {
    return tokens * columns * sizeof(bf16);
}

cudaError_t launchLinear(LinearParams const& params, cudaStream_t stream) {
    if (params.tokens <= kDECODE_TOKENS && hasLinearDecode(params.columns)) {
        return launchLinearDecode(params, stream);
    }
    GemmParams product{params.format, GemmEpilogue::kStore, params.x,    params.weight, params.scale,
                       params.y,      params.tokens,        params.rows, params.columns};
    product.plain = dividesColumns(params.tokens, params.rows);
    if (!product.plain) {
        GemmOrderParams const order{params.x, params.workspace, params.tokens, params.columns};
        if (cudaError_t const error = launchGemmOrder(order, stream); error != cudaSuccess) {
            return error;
        }
        product.x = params.workspace;
    }
    return launchGemm(product, stream);
}

} // namespace flint
