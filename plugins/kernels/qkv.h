// NormQkvRope: residual add, RMSNorm, QKV projection, per-head q/k norm, RoPE, K and V to the cache.
#pragma once

#include "kernels/types.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

constexpr int kHEAD_DIM = 128;
constexpr int kPAGE_TOKENS = 64;

/// Where K and V of the step's tokens are written.
struct KvTarget {
    enum class Kind {
        kPAGES, ///< base [pages, Hkv, 2, 64, 128]
        kRING,  ///< base [slots, Hkv, 2, ring, 128]; position p at p % ring
        kFRESH, ///< base [T, 2, Hkv, 128]
    };
    Kind kind;
    bf16* base;
    int32_t const* query_start; ///< [B + 1] i32; not for kFRESH
    int32_t const* page_table;  ///< [B, P] i32; kPAGES
    int32_t const* ring_slot;   ///< [B] i32; kRING
    int sequences;              ///< B
    int table_width;            ///< P
    int ring;                   ///< tokens of a ring
    int kv_heads;               ///< Hkv
};

struct QkvParams {
    bf16 const* delta;        ///< [T, H] bf16
    bf16 const* residual;     ///< [T, H] bf16; nullptr at the first layer
    float const* norm;        ///< [H] f32
    uint8_t const* weight;    ///< panels of [(Hq + 2 Hkv) 128, H]: q, k, v
    float const* scale;       ///< [3] f32: tensor scales of q, k, v; nullptr in BF16
    float const* q_norm;      ///< [128] f32
    float const* k_norm;      ///< [128] f32
    float const* rope;        ///< [C, 128] f32: cos | sin; nullptr: no RoPE
    int32_t const* positions; ///< [T] i32
    bf16* q;                  ///< [T, Hq, 128] bf16
    bf16* residual_out;       ///< [T, H] bf16; nullptr at the first layer
    KvTarget kv;
    void* workspace; ///< qkvWorkspaceBytes
    WeightFormat format;
    float eps;
    int tokens;   ///< T
    int hidden;   ///< H
    int heads;    ///< Hq
    int kv_heads; ///< Hkv
};

/// Bytes of workspace for `tokens` tokens: normalised rows and the raw projection.
size_t qkvWorkspaceBytes(int64_t tokens, int64_t hidden, int64_t rows);

/// The op up to the projection, whose rounded rows [T, (Hq + 2 Hkv) 128] bf16 then begin the workspace. Returns
/// cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchQkvProject(QkvParams const& params, cudaStream_t stream);

/// The whole op. Returns cudaErrorInvalidValue for a shape that has no instance.
cudaError_t launchQkv(QkvParams const& params, cudaStream_t stream);

} // namespace flint
