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
    GemmOrderParams const order{params.x, params.workspace, params.tokens, params.columns};
    if (cudaError_t const error = launchGemmOrder(order, stream); error != cudaSuccess) {
        return error;
    }
    GemmParams product{};
    product.format = params.format;
    product.epilogue = GemmEpilogue::kStore;
    product.x = params.workspace;
    product.weight = params.weight;
    product.scale = params.scale;
    product.y = params.y;
    product.tokens = params.tokens;
    product.rows = params.rows;
    product.columns = params.columns;
    return launchGemm(product, stream);
}

} // namespace flint
