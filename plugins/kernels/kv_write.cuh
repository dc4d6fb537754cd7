// Where a token's K and V go: the paged pool, a ring, or the chunk's own buffer.
#pragma once

#include "kernels/qkv.h"

namespace flint {

/// The sequence that owns row `token`, or -1 for padding: the last b with query_start[b] <= token.
__device__ __forceinline__ int findSequence(int32_t const* queryStart, int sequences, int token) {
    if (token >= __ldg(queryStart + sequences)) {
        return -1;
    }
    int low = 0, high = sequences - 1;
    while (low < high) {
        int const middle = (low + high + 1) / 2;
        if (__ldg(queryStart + middle) <= token) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/// Start of the [head_dim] vector of K (`kind` 0) or V (1) of a KV head for a token; nullptr for padding.
__device__ __forceinline__ bf16* kvVector(KvTarget const& target, int token, int position, int head, int kind) {
    constexpr int DIM = kHEAD_DIM;
    if (target.kind == KvTarget::Kind::kFRESH) {
        return target.base + ((int64_t{token} * 2 + kind) * target.kv_heads + head) * DIM;
    }
    int const sequence = findSequence(target.query_start, target.sequences, token);
    if (sequence < 0) {
        return nullptr;
    }
    int64_t place;
    int inside, length;
    if (target.kind == KvTarget::Kind::kPAGES) {
        place = __ldg(target.page_table + int64_t{sequence} * target.table_width + position / kPAGE_TOKENS);
        inside = position % kPAGE_TOKENS;
        length = kPAGE_TOKENS;
    } else {
        place = __ldg(target.ring_slot + sequence);
        inside = position % target.ring;
        length = target.ring;
    }
    return target.base + (((place * target.kv_heads + head) * 2 + kind) * length + inside) * DIM;
}

} // namespace flint
