// The one-token path of NormQkvRope's projection.
#pragma once

#include "kernels/qkv.h"

namespace flint {

/// raw [(Hq + 2 Hkv) 128] bf16; also writes residual_out. One token.
cudaError_t launchQkvProject(QkvParams const& params, bf16* raw, cudaStream_t stream);

} // namespace flint
