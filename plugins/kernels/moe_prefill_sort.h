// Sorting (token, slot) pairs by expert: in three kernels, or for a few tokens in the one that chooses. Internal to
// moe_prefill*.cu.
#pragma once

#include "kernels/gemm_problem.h"
#include "kernels/router.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flint {

constexpr int kSORT_PAIRS = 1024;  ///< of a block
constexpr int kSORT_EXPERTS = 512; ///< at most

struct MoeSortParams {
    int32_t const* experts; ///< [pairs] i32
    int32_t* counts;        ///< [ceil(pairs / kSORT_PAIRS), E] i32: scratch
    int32_t* starts;        ///< [E] i32: scratch
    GemmGroup* groups;      ///< [moeMaxGroups]
    int32_t* group_count;   ///< [1]
    int32_t* tokens;        ///< [pairs]: token at each position
    int32_t* pairs;         ///< [pairs]: pair (token * top_k + slot) at each position
    int32_t pair_count;
    int32_t num_experts;
    int32_t top_k;
    int32_t group_size; ///< positions of a group
};

/// Groups that any routing of `pairs` can need.
constexpr int64_t moeMaxGroups(int64_t pairs, int64_t experts, int64_t group_size) {
    return pairs / group_size + (pairs < experts ? pairs : experts);
}

/// Positions in order of expert, then of pair; groups in order of position. Three kernels.
cudaError_t launchMoeSort(MoeSortParams const& params, cudaStream_t stream);

/// launchRouterChoice and launchMoeSort of 9 to kSPLIT_TOKENS tokens in one kernel, which keeps the experts to itself:
/// choice.experts, params.experts and the scratch are left alone.
cudaError_t launchMoeChoose(RouterChoiceParams const& choice, MoeSortParams const& params, cudaStream_t stream);

} // namespace flint
