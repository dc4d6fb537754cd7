// NormQkvRope for up to eight tokens.
#pragma once

#include "kernels/qkv.h"

namespace flint {

/// One token: all of the op. Several: all but the norm, of which `x` [T, H] has the rows (RowOrder::kDECODE).
cudaError_t launchQkvDecode(QkvParams const& params, bf16 const* x, cudaStream_t stream);

} // namespace flint
