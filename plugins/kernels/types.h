// Types that launchers' parameters share with the kernels. Host code may include it.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

namespace flint {

using bf16 = __nv_bfloat16;

/// How a packed weight is stored (flint_plugins/layout.py).
enum class WeightFormat { kNVFP4, kBF16 };

} // namespace flint
