// Matrix products with BF16 weights: the kernels' instances.
#include "kernels/gemm_kernel.cuh"

namespace flint {

cudaError_t launchGemmBf16(GemmProblem const& problem, GemmEpilogue epilogue, GemmShape shape, int64_t max_groups,
                           cudaStream_t stream) {
    return detail::launchGemmFormat<WeightFormat::kBF16>(problem, epilogue, shape, max_groups, stream);
}

} // namespace flint
