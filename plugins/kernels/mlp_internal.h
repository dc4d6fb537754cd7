// The low-latency half of NormMlp.
#pragma once

#include "kernels/mlp.h"

namespace flint {

/// Up to kDECODE_TOKENS tokens: norm (into x [T, H] if there are several), gate, up, SwiGLU into act [T, I], both
/// ordered; writes residual_out.
cudaError_t launchMlpUpDecode(MlpParams const& params, bf16* x, bf16* act, cudaStream_t stream);

} // namespace flint
