// Matrix products with NVFP4 weights: the kernels' instances.
#include "kernels/gemm_kernel.cuh"

namespace flint {

cudaError_t launchGemmNvfp4(GemmProblem const& problem, GemmEpilogue epilogue, GemmShape shape, int64_t max_groups,
                            cudaStream_t stream) {
    return detail::launchGemmFormat<WeightFormat::kNVFP4>(problem, epilogue, shape, max_groups, stream);
}

} // namespace flint
