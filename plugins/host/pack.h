// Packing weights into the kernels' layout on the CPU, for build-engine. The layouts are flint_plugins/layout.py's,
// whose pack_nvfp4 and pack_bf16 give the same bytes; Python's side of this is flint_plugins/packing.py.
//
// A panel's rows 0 to 7 are `upper` and its rows 8 to 15 `lower`, each 8 rows that follow each other; from a panel to
// the next both advance by `panelStride`. So one matrix is packed, or two whose rows share the panels (gate and up).
#pragma once

#include <cstdint>

extern "C" {

/// NVFP4 super-blocks as GGUF stores them. `panelStride`: in bytes. `tiles`: K / 64. `packed`: [panels, 9 * K] bytes.
/// Returns the largest scale byte.
int32_t flintPackNvfp4(uint8_t const* upper, uint8_t const* lower, int64_t panelStride, int64_t panels, int32_t tiles,
                       uint8_t* packed);

/// BF16 values. `panelStride`: in values. `packed`: [panels, 16 * K] values.
void flintPackBf16(uint16_t const* upper, uint16_t const* lower, int64_t panelStride, int64_t panels, int32_t tiles,
                   uint16_t* packed);
}
