#include "kernels/moe_prefill.h"

#include "kernels/device.cuh"
#include "kernels/gemm_problem.h"
#include "kernels/launch.h"
#include "kernels/moe.h"
#include "kernels/moe_prefill_sort.h"
#include "kernels/panel.cuh"

namespace flint {

namespace {

constexpr int kCOMBINE_THREADS = 256;
constexpr int kVECTOR = 8;      // BF16 values in 16 bytes
constexpr int kLEAST_GROUP = 8; // positions of launchGemmStream's smaller groups

constexpr int64_t ceilDiv(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/// What lies in the workspace, in this order, each part aligned to 256 bytes.
struct Workspace {
    int32_t* experts; ///< [T, 6]
    float* weights;   ///< [T, 6]
    int32_t* counts;
    int32_t* starts;
    GemmGroup* groups;
    int32_t* group_count;
    int32_t* tokens; ///< [T * 6]
    int32_t* pairs;  ///< [T * 6]
    uint8_t* act;    ///< [T * 6 positions, I] bf16, ordered
    uint8_t* y;      ///< [T, 6, H] bf16
    size_t bytes;

    explicit Workspace(MoePrefillParams const& params)
        : Workspace(params.workspace, params.tokens, params.num_experts, params.hidden, params.intermediate) {}

    Workspace(void* base, int64_t tokens, int64_t experts, int64_t hidden, int64_t intermediate) {
        int64_t const pairs = tokens * kTOP_K;
        size_t offset = 0;
        auto const take = [&](int64_t bytes) {
            uint8_t* const part = static_cast<uint8_t*>(base) + offset;
            offset += ceilDiv(bytes, 256) * 256;
            return part;
        };
        this->experts = reinterpret_cast<int32_t*>(take(pairs * 4));
        weights = reinterpret_cast<float*>(take(pairs * 4));
        counts = reinterpret_cast<int32_t*>(take(ceilDiv(pairs, kSORT_PAIRS) * experts * 4));
        starts = reinterpret_cast<int32_t*>(take(experts * 4));
        // For the smallest groups: whichever size is chosen needs no more.
        groups =
            reinterpret_cast<GemmGroup*>(take(moeMaxGroups(pairs, experts, kLEAST_GROUP) * int64_t{sizeof(GemmGroup)}));
        group_count = reinterpret_cast<int32_t*>(take(4));
        this->tokens = reinterpret_cast<int32_t*>(take(pairs * 4));
        this->pairs = reinterpret_cast<int32_t*>(take(pairs * 4));
        act = take(pairs * intermediate * 2);
        y = take(pairs * hidden * 2);
        bytes = offset;
    }
};

struct CombineParams {
    uint4 const* y;       ///< [T, 6, H / 8]
    float const* weights; ///< [T, 6]
    uint4 const* shared;  ///< [T, H / 8]
    uint4* out;           ///< [T, H / 8]
    int64_t vectors;      ///< T * H / 8
    int vectors_per_row;  ///< H / 8
};

/// out = r(r(sum w y) + shared), one thread per 8 columns; products and sums rounded one by one, in slot order.
__global__ void __launch_bounds__(kCOMBINE_THREADS) moeCombineKernel(CombineParams params) {
    waitForPredecessor();
    allowSuccessor();
    int64_t const i = static_cast<int64_t>(blockIdx.x) * kCOMBINE_THREADS + threadIdx.x;
    if (i >= params.vectors) {
        return;
    }
    int64_t const token = i / params.vectors_per_row;
    int64_t const column = i - token * params.vectors_per_row;
    uint4 y[kTOP_K];
    float weights[kTOP_K];
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        y[slot] = params.y[(token * kTOP_K + slot) * params.vectors_per_row + column];
        weights[slot] = params.weights[token * kTOP_K + slot];
    }
    uint4 const shared = params.shared[i];
    float sum[kVECTOR] = {};
#pragma unroll
    for (int slot = 0; slot < kTOP_K; ++slot) {
        uint32_t const words[4] = {y[slot].x, y[slot].y, y[slot].z, y[slot].w};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            float2 const value = unpackBf16(words[word]);
            sum[2 * word] = __fadd_rn(sum[2 * word], __fmul_rn(weights[slot], value.x));
            sum[2 * word + 1] = __fadd_rn(sum[2 * word + 1], __fmul_rn(weights[slot], value.y));
        }
    }
    uint32_t words[4] = {shared.x, shared.y, shared.z, shared.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        float2 const value = unpackBf16(words[word]);
        words[word] = packBf16(roundBf16(sum[2 * word]) + value.x, roundBf16(sum[2 * word + 1]) + value.y);
    }
    params.out[i] = make_uint4(words[0], words[1], words[2], words[3]);
}

bool valid(MoePrefillParams const& params) {
    constexpr int64_t LIMIT = int64_t{1} << 31; // of elements that a product's input offsets reach
    return params.tokens >= 0 && params.hidden > 0 && params.hidden % 64 == 0 && params.intermediate > 0 &&
           params.intermediate % 64 == 0 && params.num_experts >= kTOP_K && params.num_experts <= kSORT_EXPERTS &&
           params.tokens * params.hidden < LIMIT && params.tokens * kTOP_K * params.intermediate < LIMIT;
}

/// How both products of the experts are divided, which have the same groups.
struct Division {
    bool streams;    ///< launchGemmStream, else a tile shape
    GemmShape shape; ///< unless it streams
    int group_size;

    cudaError_t launch(MoePrefillParams const& params, GemmProblem const& problem, GemmEpilogue epilogue,
                       GemmDevice const& device, cudaStream_t stream) const {
        int64_t const most = moeMaxGroups(params.tokens * kTOP_K, params.num_experts, group_size);
        return streams ? launchGemmStream(problem, epilogue, group_size, most, device, stream)
                       : launchGemmProblem(params.format, problem, epilogue, shape, most, stream);
    }
};

/// By mean positions per expert: few read the weights and do little else. Of more a tile should be filled, and weights
/// be dequantised for as many as there are. The limits are where an H200 took the same time. Streams of BF16 weights
/// gained nothing at 32 tokens.
Division divide(MoePrefillParams const& params, GemmDevice const& device) {
    int64_t const mean = params.tokens * kTOP_K / params.num_experts;
    for (int const few : {params.tokens <= kSPLIT_TOKENS ? kLEAST_GROUP : 2 * kLEAST_GROUP, kLEAST_GROUP}) {
        int64_t const most = moeMaxGroups(params.tokens * kTOP_K, params.num_experts, few);
        if (params.format == WeightFormat::kNVFP4 && mean < 20 && gemmStreamFits(params.hidden, few, most, device) &&
            gemmStreamFits(params.intermediate, few, most, device)) {
            return {true, {}, few};
        }
    }
    GemmShape shape = mean >= 40   ? GemmShape::kLarge
                      : mean >= 32 ? GemmShape::kMedium
                      : mean >= 12 ? GemmShape::kSmall
                                   : GemmShape::kTiny;
    if (!gemmFits(params.format, GemmEpilogue::kSwiGlu, shape, device) ||
        !gemmFits(params.format, GemmEpilogue::kStore, shape, device)) {
        shape = GemmShape::kMedium;
    }
    return {false, shape, gemmShapeTokens(shape)};
}

} // namespace

size_t moePrefillWorkspaceBytes(int64_t tokens, int64_t num_experts, int64_t hidden, int64_t intermediate) {
    return Workspace(nullptr, tokens, num_experts, hidden, intermediate).bytes;
}

cudaError_t launchMoePrefillRoutes(MoePrefillParams const& params, cudaStream_t stream) {
    if (!valid(params)) {
        return cudaErrorInvalidValue;
    }
    if (params.tokens == 0) {
        return cudaSuccess;
    }
    GemmDevice device;
    cudaError_t status = gemmDevice(device);
    if (status != cudaSuccess) {
        return status;
    }
    Workspace const work(params);
    RouterChoiceParams const choice{params.logits, work.experts, work.weights, static_cast<int>(params.tokens),
                                    static_cast<int>(params.num_experts)};
    MoeSortParams sort{};
    sort.experts = work.experts;
    sort.counts = work.counts;
    sort.starts = work.starts;
    sort.groups = work.groups;
    sort.group_count = work.group_count;
    sort.tokens = work.tokens;
    sort.pairs = work.pairs;
    sort.pair_count = static_cast<int32_t>(params.tokens * kTOP_K);
    sort.num_experts = static_cast<int32_t>(params.num_experts);
    sort.top_k = kTOP_K;
    sort.group_size = divide(params, device).group_size;
    if (params.tokens <= kSPLIT_TOKENS) {
        return launchMoeChoose(choice, sort, stream);
    }
    status = launchRouterChoice(choice, stream);
    return status != cudaSuccess ? status : launchMoeSort(sort, stream);
}

cudaError_t launchMoePrefillExperts(MoePrefillParams const& params, cudaStream_t stream) {
    if (!valid(params)) {
        return cudaErrorInvalidValue;
    }
    if (params.tokens == 0) {
        return cudaSuccess;
    }
    GemmDevice device;
    cudaError_t status = gemmDevice(device);
    if (status != cudaSuccess) {
        return status;
    }
    Workspace const work(params);
    int64_t const pairs = params.tokens * kTOP_K;
    Division const division = divide(params, device);
    GemmProblem up{};
    up.x = static_cast<uint8_t const*>(params.x);
    up.weight = static_cast<uint8_t const*>(params.gate_up);
    up.scale = params.gate_up_scale;
    up.y = work.act;
    up.x_rows = work.tokens;
    up.groups = work.groups;
    up.group_count = work.group_count;
    up.positions = static_cast<int32_t>(pairs);
    up.columns = static_cast<int32_t>(params.hidden);
    up.panels = static_cast<int32_t>(2 * params.intermediate / kPANEL_ROWS);
    up.scale_stride = 2;
    up.round_gate_up = false;
    up.ready = params.ready ? GemmReady::kAll : GemmReady::kNothing;
    status = division.launch(params, up, GemmEpilogue::kSwiGlu, device, stream);
    if (status != cudaSuccess) {
        return status;
    }

    GemmProblem down = up;
    down.x = work.act;
    down.weight = static_cast<uint8_t const*>(params.down);
    down.scale = params.down_scale;
    down.y = work.y;
    down.x_rows = nullptr;
    down.y_rows = work.pairs;
    down.columns = static_cast<int32_t>(params.intermediate);
    down.panels = static_cast<int32_t>(params.hidden / kPANEL_ROWS);
    down.scale_stride = 1;
    down.ready = GemmReady::kWeights; // the groups were complete before up allowed it to start
    down.segment_panels[0] = down.segment_panels[1] = down.panels;
    status = division.launch(params, down, GemmEpilogue::kStore, device, stream);
    if (status != cudaSuccess) {
        return status;
    }

    CombineParams combine;
    combine.y = reinterpret_cast<uint4 const*>(work.y);
    combine.weights = work.weights;
    combine.shared = static_cast<uint4 const*>(params.shared);
    combine.out = static_cast<uint4*>(params.out);
    combine.vectors_per_row = static_cast<int>(params.hidden / kVECTOR);
    combine.vectors = params.tokens * combine.vectors_per_row;
    unsigned const blocks = static_cast<unsigned>(ceilDiv(combine.vectors, kCOMBINE_THREADS));
    return launchOverlapped(moeCombineKernel, dim3(blocks), dim3(kCOMBINE_THREADS), 0, stream, combine);
}

} // namespace flint
