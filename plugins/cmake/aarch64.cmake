# Toolchain: the plugin library for arm64 hosts (Grace, GB10), compiled on x86-64 by `make wheel`.
#
# Device code and CUDA's headers are the same for every host. The host's part needs Debian's g++-aarch64-linux-gnu and
# the CUDA runtime for arm64, which `make wheel` puts into build/cuda-aarch64.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
get_filename_component(FLINT_CUDA_LIBRARIES "${CMAKE_CURRENT_LIST_DIR}/../../build/cuda-aarch64/nvidia/cu13/lib" ABSOLUTE)
# nvcc looks for headers in the target directory of the host compiler, which an x86-64 toolkit lacks.
set(CMAKE_CUDA_FLAGS_INIT "--target-directory=x86_64-linux -L\"${FLINT_CUDA_LIBRARIES}\"")
set(CUDA_cudart_static_LIBRARY "${FLINT_CUDA_LIBRARIES}/libcudart_static.a" CACHE FILEPATH "CUDA runtime for arm64")
set(CUDA_CUDART "${CUDA_cudart_static_LIBRARY}" CACHE FILEPATH "CUDA runtime for arm64")
