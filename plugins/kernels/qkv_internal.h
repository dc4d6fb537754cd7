// The QKV projection for up to eight tokens.
#pragma once

#include "kernels/qkv.h"

namespace flint {

/// raw [T, (Hq + 2 Hkv) 128] bf16. One token: norm and projection. Several: the projection of `x` [T, H], the
/// normalised rows (RowOrder::kDECODE).
cudaError_t launchQkvDecode(QkvParams const& params, bf16 const* x, bf16* raw, cudaStream_t stream);

} // namespace flint
